"""The links that a log alone can give. None of them proves: a log can be forged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from diagnostics.proof.case import MOST_RANKS
from diagnostics.proof.link import Link, State, file_name, listed
from diagnostics.proof.logs import LogFacts, Start
from diagnostics.proof.worker import ONLY_V2_SINCE, selected_worker, wrong_file


def selected_in_log(start: Start) -> tuple[str | None, str]:
    """The worker class that the arguments in the log select, and why; None when they select or say none."""
    if not start.arguments_complete or "speculative_algorithm" not in start.arguments:
        return None, "the arguments are not in the log"
    if start.arguments_form == "dict":  # printed so by releases that have only the V2 workers
        return selected_worker(start.arguments, ".".join(map(str, ONLY_V2_SINCE)))[0], "this SGLang has no other"
    return selected_worker({"disable_overlap_schedule": False, **start.arguments})


def log_links(facts: LogFacts, source: str, reference: Sequence[Mapping[str, Any]]) -> Iterator[Link]:
    """The links of a log; `reference` are the manifests of the series that are known."""
    start = facts.current
    if facts.bytes == 0:
        yield Link("log", "", "empty", source, "unknown", "the log is empty: nothing was started, or it was rotated")
        return
    if start is None:
        seen = "SGLang's lines, but no start" if facts.recognised else "no line of SGLang's"
        reason = (
            "the log does not reach back to a start of the server: give the older, rotated files too"
            if facts.recognised
            else "this is not a log of SGLang: give the server's own log"
        )
        yield Link("log", "a start of SGLang", seen, source, "unknown", reason)
        return
    chosen: str | None = None
    if not start.arguments_complete:
        seen = "cut" if start.arguments else "absent"
        reason = (
            "the line with the server's arguments is cut or was rotated away: the worker cannot be told from this log"
        )
        yield Link("arguments", "server_args=", seen, source, "unknown", reason)
    else:
        chosen, why = selected_in_log(start)
        if chosen is None:
            reason = "this server runs without speculative decoding: there is no worker to patch"
            yield Link("worker", "a speculative worker", "none", source, "refuted", reason)
            return
        yield Link("worker", chosen, f"selected: {why}", source, "consistent")
    yield from _log_identity_links(start, chosen, source, reference)
    if start.crashes:
        reason = f"the server crashed ({start.crashes[-1]}): read the log before the crash, then start it again"
        yield Link("serving", "alive", "crashed", source, "refuted", reason)
    elif start.stop_signals:
        reason = f"this server was stopped ({start.stop_signals[-1]}): it serves no longer"
        yield Link("serving", "alive", start.stop_signals[-1], source, "refuted", reason)


def _log_identity_links(
    start: Start, chosen: str | None, source: str, reference: Sequence[Mapping[str, Any]]
) -> Iterator[Link]:
    ranks = start.arguments.get("tp_size") if start.arguments_complete else None
    expected = set(range(ranks)) if isinstance(ranks, int) and 0 < ranks <= MOST_RANKS else set()
    seen = {identity["tp_rank"]: identity for identity in start.identities}
    missing = sorted(expected - set(seen))
    if missing or not seen:
        who = "no rank" if not seen else f"rank {listed(missing)} of {ranks} did not say that it"
        text = "none" if not seen else f"ranks {listed(sorted(map(str, seen)))}"
        if start.torn_identities:
            state: State = "unknown"
            reason = "an identity line is torn: take the log from the journal of the unit"
        elif start.ready and start.arguments_complete:
            state = "refuted"
            prefix = f"this server runs {chosen}, but no rank loaded" if not seen else f"{who} loaded"
            reason = f"{prefix} the patched files before it was ready: deploy with the patch, or restart the service"
        else:
            state = "unknown"
            reason = "the server had not finished starting when this log ended: give a later log"
        yield Link("identity", f"{ranks or 'every'} rank(s)", text, source, state, reason)
    else:
        text = listed(f"rank {rank}: {identity['worker']}" for rank, identity in sorted(seen.items()))
        yield Link("identity", f"{ranks or 'every'} rank(s)", text, source, "consistent")
    threshold = {identity["threshold"] for identity in seen.values()}
    if len(threshold) > 1:
        reason = f"the ranks disagree about the threshold ({listed(sorted(map(str, threshold)))}): restart the service"
        yield Link("threshold", "one value", listed(sorted(map(str, threshold))), source, "refuted", reason)
    series = {manifest["series"] for manifest in reference}
    for rank, identity in sorted(seen.items()):
        name, module = identity["worker"], identity["worker_module"]
        modules = {entry["module"] for entry in identity["modules"] if "module" in entry}
        if chosen is not None and name != chosen:
            reason = f"rank {rank} says it runs {name}, the arguments select {chosen}: two servers' log, or forged"
            yield Link("identity", chosen, name, source, "refuted", reason)
        elif module not in modules:
            reason = wrong_file(sorted(modules), name, module, "")
            yield Link("patch", module, listed(map(file_name, sorted(modules))), source, "refuted", reason)
        elif series and identity["series"] not in series:
            reason = f"rank {rank} loaded series {identity['series']}, which this checkout does not ship"
            yield Link("series", listed(sorted(series)), identity["series"], source, "unknown", reason)


def log_notes(facts: LogFacts) -> Iterator[str]:
    """What does not change the verdict on a log."""
    if facts.starts > 1:
        yield f"{facts.starts} starts in this log; only the last one was judged"
    if facts.imitations:
        yield f"{facts.imitations} marker(s) inside other text (an echoed prompt?) were ignored"
    if facts.truncated:
        yield "the log was not read to its end"
