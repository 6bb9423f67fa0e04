"""Evidence -> verdict: do the processes that serve now run the patched file, in the worker class that this
configuration selects, on every rank?

Pure functions; no input or output. The verdict is a chain of links. Each compares what was claimed (by the deployment,
the manifest, the configuration) with what was seen, and where. One refuted link refutes the whole; a link that could
not be examined leaves it unknown, which is never success. The links are in the order of cause and effect, so that the
first one that fails names the cause.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from diagnostics.proof.case import Case
from diagnostics.proof.chain import CHAIN, notes
from diagnostics.proof.link import Link, listed, text_of
from diagnostics.proof.log_chain import log_links, log_notes, selected_in_log
from diagnostics.proof.logs import LogFacts

SCHEMA = "specgate.verdict/1"


@dataclass(frozen=True)
class Verdict:
    """The verdict about one host.

    `worker` is the class that the ranks say they run, else the one that the server's arguments select, else None.
    """

    host: str
    verdict: Literal["proved", "refuted", "unknown"]
    reason: str
    worker: str | None = None
    links: tuple[Link, ...] = ()
    notes: tuple[str, ...] = field(default=())

    def document(self) -> dict[str, Any]:
        """The verdict as an entry of a `specgate.verdict/1` document."""
        return asdict(self) | {"links": [asdict(link) for link in self.links], "notes": list(self.notes)}


def document(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """The `specgate.verdict/1` document over all hosts. `worker` is None unless all hosts agree."""
    workers = {verdict.worker for verdict in verdicts}
    return {
        "schema": SCHEMA,
        "verdict": overall(verdicts),
        "worker": workers.pop() if len(workers) == 1 else None,
        "hosts": [verdict.document() for verdict in verdicts],
    }


def overall(verdicts: Sequence[Verdict]) -> Literal["proved", "refuted", "unknown"]:
    """Refuted when one host is refuted, proved when each is proved and there is one, else unknown."""
    found = {verdict.verdict for verdict in verdicts}
    if "refuted" in found:
        return "refuted"
    return "proved" if found == {"proved"} else "unknown"


def judge(evidence: Mapping[str, Any], speculation: bool = True) -> Verdict:
    """Judge the evidence about one host (`specgate.evidence/1`, see docs/verify-worker.md).

    Without `speculation` the server is meant to run the patched release and not to speculate.
    """
    host = evidence["host"]
    if evidence.get("error"):
        return Verdict(host, "unknown", f"the host could not be examined: {evidence['error']}")
    try:
        return _judge(Case(evidence, speculation))
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        # What a service writes into its files and answers can have any shape.
        reason = f"the evidence is not of the expected shape ({type(error).__name__}: {error}): update this checkout"
        return Verdict(host, "unknown", reason)


def _judge(case: Case) -> Verdict:
    host = case.evidence["host"]
    links = tuple(link for examine in CHAIN for link in examine(case))
    worker = case.worker_seen or case.worker_selected
    for state in ("refuted", "unknown"):
        reason = next((link.reason for link in links if link.state == state), None)
        if reason is not None:
            return Verdict(host, state, reason, worker, links, tuple(notes(case)))
    if missing := _missing(case, links):
        reason = f"the evidence says nothing about {listed(missing)}: gather it again with this version"
        return Verdict(host, "unknown", reason, worker, links, tuple(notes(case)))
    count = len(case.expected_ranks)
    ranks = "its one rank runs" if count == 1 else f"all {count} ranks run"
    what = f"the patched {worker}" if case.speculation else "the patched release without speculation"
    by = f"profile {case.profile_seen}" if case.profile_seen else f"threshold {text_of(case.threshold_seen)}"
    reason = f"{ranks} {what}, series {case.series}, {by}"
    return Verdict(host, "proved", reason, worker, links, tuple(notes(case)))


def _missing(case: Case, links: Sequence[Link]) -> list[str]:
    """What a proof needs and no link has proved. Without it, a link that was never made would pass for a proved one."""
    needed = ["ranks", "worker", "file ", "answers"]
    needed += [] if case.speculation else ["overlap schedule"]
    of_each_rank = ["loaded", "threshold"]
    if case.deployment is not None and case.deployment.get("profile") is not None:
        of_each_rank.append("profile")
    needed += [f"{what}, rank {rank}" for rank in case.expected_ranks for what in of_each_rank]
    proved = [link.name for link in links if link.state == "proved"]
    return [name.strip() for name in needed if not any(link.startswith(name) for link in proved)]


def judge_log(facts: LogFacts, source: str, reference: Sequence[Mapping[str, Any]] = ()) -> Verdict:
    """Judge a log alone. A log can be forged: it can refute, or leave unknown, but never prove."""
    links = tuple(log_links(facts, source, reference))
    worker = None
    if facts.current is not None:
        worker = next((identity["worker"] for identity in facts.current.identities), None)
        worker = worker or selected_in_log(facts.current)[0]
    notes = tuple(log_notes(facts))
    for state in ("refuted", "unknown"):
        reason = next((link.reason for link in links if link.state == state), None)
        if reason is not None:
            return Verdict(source, state, reason, worker, links, notes)
    reason = "the log agrees with a patched server, but a log can be forged: examine the host with fab verify-worker"
    return Verdict(source, "unknown", reason, worker, links, notes)
