"""Evidence -> verdict: do the processes that serve now run the patched file, in the worker class that this
configuration selects, on every rank?

Pure functions; no input or output. The verdict is a chain of links. Each compares what was claimed (by the deployment,
the manifest, the configuration) with what was seen, and where. One refuted link refutes the whole; a link that could
not be examined leaves it unknown, which is never success. The links are in the order of cause and effect, so that the
first one that fails names the cause.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Literal

from diagnostics.logs import LogFacts, Start

SCHEMA = "specgate.verdict/1"
DEPLOYMENT_SCHEMA = "specgate.deployment/1"
IDENTITY_SCHEMA = "spec_gate.identity/1"

State = Literal["proved", "refuted", "unknown", "consistent", "not applicable"]

WORKER_MODULES = {
    "EAGLEWorker": "sglang.srt.speculative.eagle_worker",
    "EAGLEWorkerV2": "sglang.srt.speculative.eagle_worker_v2",
    "MultiLayerEagleWorker": "sglang.srt.speculative.multi_layer_eagle_worker",
    "MultiLayerEagleWorkerV2": "sglang.srt.speculative.multi_layer_eagle_worker_v2",
    "StandaloneWorker": "sglang.srt.speculative.standalone_worker",
    "StandaloneWorkerV2": "sglang.srt.speculative.standalone_worker_v2",
    "NGRAMWorker": "sglang.srt.speculative.ngram_worker",
}
"""SGLang's speculative workers and their modules (SpeculativeAlgorithm.create_worker in speculative/spec_info.py)."""

ONLY_V2_SINCE = (0, 5, 13)
"""From this release on SGLang has only the V2 workers, with and without the overlap schedule."""

THRESHOLD_OPTION = "--speculative-disable-batch-threshold"
NOT_ESSENTIAL = ("the owners of GPU memory",)


@dataclass(frozen=True)
class Link:
    """One link of the chain. Where it is refuted or unknown, `reason` says what is wrong and what to do, in a sentence.

    "consistent" is the best that a link can be that rests on a log alone.
    """

    name: str
    claimed: str
    seen: str
    where: str
    state: State
    reason: str = ""


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


def judge(evidence: Mapping[str, Any]) -> Verdict:
    """Judge the evidence about one host (`specgate.evidence/1`, see docs/verify-worker.md)."""
    host = evidence["host"]
    if evidence.get("error"):
        return Verdict(host, "unknown", f"the host could not be examined: {evidence['error']}")
    case = _Case(evidence)
    try:
        return _judge(case)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        # What a service writes into its files and answers can have any shape.
        reason = f"the evidence is not of the expected shape ({type(error).__name__}: {error}): update this checkout"
        return Verdict(host, "unknown", reason)


def _judge(case: _Case) -> Verdict:
    host = case.evidence["host"]
    links = tuple(link for examine in _CHAIN for link in examine(case))
    worker = case.worker_seen or case.worker_selected
    for state in ("refuted", "unknown"):
        reason = next((link.reason for link in links if link.state == state), None)
        if reason is not None:
            return Verdict(host, state, reason, worker, links, tuple(_notes(case)))
    if missing := _missing(case, links):
        reason = f"the evidence says nothing about {_list(missing)}: gather it again with this version"
        return Verdict(host, "unknown", reason, worker, links, tuple(_notes(case)))
    count = len(case.expected_ranks)
    ranks = "its one rank runs" if count == 1 else f"all {count} ranks run"
    reason = f"{ranks} the patched {worker}, series {case.series}, threshold {_text(case.threshold_seen)}"
    return Verdict(host, "proved", reason, worker, links, tuple(_notes(case)))


def _missing(case: _Case, links: Sequence[Link]) -> list[str]:
    """What a proof needs and no link has proved. Without it, a link that was never made would pass for a proved one."""
    needed = ["ranks", "worker", "file ", "answers"]
    needed += [f"{what}, rank {rank}" for rank in case.expected_ranks for what in ("loaded", "threshold")]
    proved = [link.name for link in links if link.state == "proved"]
    return [name.strip() for name in needed if not any(link.startswith(name) for link in proved)]


def selected_worker(arguments: Mapping[str, Any], version: str | None = None) -> tuple[str | None, str]:
    """The worker class that SGLang takes for these resolved arguments, and why.

    `version` is SGLang's, where it is known. The class is None when the arguments select none; raises KeyError when an
    argument that decides is missing.
    """
    algorithm = arguments["speculative_algorithm"]
    if algorithm is None:
        return None, "speculative_algorithm is None"
    if algorithm == "NGRAM":
        return "NGRAMWorker", "speculative_algorithm is NGRAM"
    if algorithm == "STANDALONE":
        family = "StandaloneWorker"
    elif algorithm in ("EAGLE", "EAGLE3", "NEXTN"):
        family = "MultiLayerEagleWorker" if arguments.get("enable_multi_layer_eagle") else "EAGLEWorker"
    else:
        return f"a worker for {algorithm}", f"speculative_algorithm is {algorithm}"
    if version is not None and _release(version) >= ONLY_V2_SINCE:
        return family + "V2", f"SGLang {version} has no other"
    if not arguments["disable_overlap_schedule"]:
        return family + "V2", "disable_overlap_schedule=False"
    top_k = arguments.get("speculative_eagle_topk")
    if isinstance(top_k, int) and top_k > 1:
        return family, f"top-k {top_k} forces disable_overlap_schedule=True"
    return family, "disable_overlap_schedule=True"


def judge_log(facts: LogFacts, source: str, reference: Sequence[Mapping[str, Any]] = ()) -> Verdict:
    """Judge a log alone. A log can be forged: it can refute, or leave unknown, but never prove."""
    links = tuple(_log_links(facts, source, reference))
    worker = None
    if facts.current is not None:
        worker = next((identity.get("worker") for identity in facts.current.identities), None)
        worker = worker or _selected_in_log(facts.current)[0]
    notes = tuple(_log_notes(facts))
    for state in ("refuted", "unknown"):
        reason = next((link.reason for link in links if link.state == state), None)
        if reason is not None:
            return Verdict(source, state, reason, worker, links, notes)
    reason = "the log agrees with a patched server, but a log can be forged: examine the host with fab verify-worker"
    return Verdict(source, "unknown", reason, worker, links, notes)


def _selected_in_log(start: Start) -> tuple[str | None, str]:
    if not start.arguments_complete or "speculative_algorithm" not in start.arguments:
        return None, "the arguments are not in the log"
    if start.arguments_form == "dict":  # printed so by releases that have only the V2 workers
        return selected_worker(start.arguments, ".".join(map(str, ONLY_V2_SINCE)))[0], "this SGLang has no other"
    return selected_worker({"disable_overlap_schedule": False, **start.arguments})


def _log_links(facts: LogFacts, source: str, reference: Sequence[Mapping[str, Any]]) -> Iterator[Link]:
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
        chosen, why = _selected_in_log(start)
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
    seen = {identity.get("tp_rank"): identity for identity in start.identities}
    missing = sorted(expected - set(seen))
    if missing or not seen:
        who = "no rank" if not seen else f"rank {_list(missing)} of {ranks} did not say that it"
        text = "none" if not seen else f"ranks {_list(sorted(map(str, seen)))}"
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
    threshold = {identity.get("threshold") for identity in seen.values()}
    if len(threshold) > 1:
        reason = f"the ranks disagree about the threshold ({_list(sorted(map(str, threshold)))}): restart the service"
        yield Link("threshold", "one value", _list(sorted(map(str, threshold))), source, "refuted", reason)
    series = {manifest["series"] for manifest in reference}
    for rank, identity in sorted(seen.items(), key=str):
        name, module = identity.get("worker"), identity.get("worker_module")
        modules = {entry.get("module") for entry in _dicts(identity.get("modules"))}
        if chosen is not None and name != chosen:
            reason = f"rank {rank} says it runs {name}, the arguments select {chosen}: two servers' log, or forged"
            yield Link("identity", chosen, str(name), source, "refuted", reason)
        elif module not in modules:
            reason = _wrong_file(sorted(map(str, modules)), str(name), str(module), "")
            yield Link(
                "patch", str(module), _list(map(_file_name, sorted(map(str, modules)))), source, "refuted", reason
            )
        elif series and identity.get("series") not in series:
            reason = f"rank {rank} loaded series {identity.get('series')}, which this checkout does not ship"
            yield Link("series", _list(sorted(series)), str(identity.get("series")), source, "unknown", reason)


def _log_notes(facts: LogFacts) -> Iterator[str]:
    if facts.starts > 1:
        yield f"{facts.starts} starts in this log; only the last one was judged"
    if facts.imitations:
        yield f"{facts.imitations} marker(s) inside other text (an echoed prompt?) were ignored"
    if facts.truncated:
        yield "the log was not read to its end"


MOST_RANKS = 4096


class _Case:
    """The evidence of one host, with what follows from it by itself."""

    def __init__(self, evidence: Mapping[str, Any]) -> None:
        self.evidence = evidence
        self.unit: Mapping[str, Any] | None = evidence.get("unit")
        self.unit_name: str = (self.unit or {}).get("Id") or "the service"
        self.deployment: Mapping[str, Any] | None = evidence.get("deployment")
        self.interpreter: Mapping[str, Any] | None = evidence.get("interpreter")
        self.server: Mapping[str, Any] = evidence.get("server") or {}
        self.processes: list[Mapping[str, Any]] = _dicts(evidence.get("processes"))

    @cached_property
    def main(self) -> Mapping[str, Any] | None:
        """The server's main process, alive."""
        found = (process for process in self.processes if process["pid"] == self.evidence.get("main_pid"))
        return next((process for process in found if process["state"] != "Z"), None)

    @cached_property
    def schedulers(self) -> dict[int, Mapping[str, Any]]:
        """The living scheduler processes by their rank."""
        return {
            process["tp_rank"]: process
            for process in self.processes
            if process["role"] == "scheduler" and process["state"] not in "ZX"
        }

    @cached_property
    def start(self) -> Start | None:
        """What the log says of the running start."""
        current = ((self.evidence.get("log") or {}).get("facts") or {}).get("current")
        return Start(**current) if current else None

    @cached_property
    def info(self) -> Mapping[str, Any] | None:
        """What /server_info answered, if the one who answered belongs to this server."""
        inside = (self.server.get("listener") or {}).get("inside")
        return self.server.get("info") if inside else None

    @cached_property
    def ready(self) -> bool:
        """Whether the server has finished starting."""
        return self.info is not None or (self.start is not None and self.start.ready)

    @cached_property
    def arguments(self) -> tuple[Mapping[str, Any], str] | None:
        """The server's resolved arguments and where they were read."""
        if self.info is not None and self.info.get("arguments"):
            return self.info["arguments"], "/server_info"
        if self.start is not None and self.start.arguments_complete:
            return self.start.arguments, "log"
        return None

    @cached_property
    def version(self) -> str | None:
        """SGLang's version, as the server says it or else as the interpreter finds it installed."""
        return (self.info or {}).get("version") or (self.interpreter or {}).get("sglang_version")

    @cached_property
    def expected_ranks(self) -> list[int]:
        """The ranks that must run on this host."""
        arguments = self.arguments[0] if self.arguments else {}
        size = arguments.get("tp_size") or (self.deployment or {}).get("tp_size") or 1
        nodes = arguments.get("nnodes") or 1
        if not isinstance(size, int) or not isinstance(nodes, int) or not 0 < nodes <= size <= MOST_RANKS:
            return [0]
        here = size // nodes
        first = here * int(arguments.get("node_rank") or 0)
        return list(range(first, first + here))

    @cached_property
    def manifest(self) -> tuple[Mapping[str, Any], str] | None:
        """The manifest of the claimed series and where it was read."""
        if self.evidence.get("manifest"):
            return self.evidence["manifest"], "the release's manifest"
        for manifest in _dicts(self.evidence.get("reference")):
            if self.deployment is None and manifest["sglang_version"] == self.version:
                return manifest, "this checkout's manifest"
        return None

    @property
    def series(self) -> str | None:
        """The claimed series."""
        return self.manifest[0]["series"] if self.manifest else None

    @cached_property
    def identities(self) -> dict[int, tuple[Mapping[str, Any], Mapping[str, Any], str]]:
        """By rank: identity, gate block and source, from inside a process that lives now and is that rank."""
        found: dict[int, tuple[Mapping[str, Any], Mapping[str, Any], str]] = {}
        for identity, gate, where in self._claims_of_ranks():
            rank = identity.get("tp_rank")
            process = self.schedulers.get(rank) if isinstance(rank, int) else None
            if isinstance(rank, int) and process is not None and _is_same_process(identity, process):
                found.setdefault(rank, (identity, gate, where))
        return found

    def _claims_of_ranks(self) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any], str]]:
        for entry in _dicts(self.evidence.get("rank_files")):
            content = entry.get("document") or {}
            identity, gate = content.get("identity"), content.get("gate")
            if isinstance(identity, Mapping) and identity.get("schema") == IDENTITY_SCHEMA:
                yield identity, gate if isinstance(gate, Mapping) else {}, entry["file"]
        for gate in _dicts((self.info or {}).get("gates")):
            identity = gate.get("identity")
            if isinstance(identity, Mapping) and identity.get("schema") == IDENTITY_SCHEMA:
                yield identity, gate, "/server_info"

    @cached_property
    def stale_files(self) -> list[str]:
        """Status files of processes that are not this server's, or no longer."""
        current = {where for _, _, where in self.identities.values()}
        return [entry["file"] for entry in _dicts(self.evidence.get("rank_files")) if entry["file"] not in current]

    @cached_property
    def worker_seen(self) -> str | None:
        """The worker class that the ranks say they run, if they agree."""
        found = {identity.get("worker") for identity, _, _ in self.identities.values()}
        return found.pop() if len(found) == 1 else None

    @property
    def worker_selected(self) -> str | None:
        """The worker class that the server's arguments select, as far as they are known."""
        if self.arguments is None or not {"speculative_algorithm", "disable_overlap_schedule"} <= set(
            self.arguments[0]
        ):
            return None
        return selected_worker(self.arguments[0], self.version)[0]

    @cached_property
    def threshold_seen(self) -> Any:
        """The threshold in force, if the ranks agree."""
        found = {gate.get("threshold", identity.get("threshold")) for identity, gate, _ in self.identities.values()}
        return found.pop() if len(found) == 1 else None

    @cached_property
    def options(self) -> list[str]:
        """The main process's command line."""
        return list((self.main or {}).get("command") or [])

    @cached_property
    def drop_in(self) -> str:
        """A remark on a drop-in that replaces the command line, for the sentence that needs one."""
        for entry in _dicts((self.unit or {}).get("drop_ins")):
            if "ExecStart" in entry.get("settings", []):
                return f" (the drop-in {entry['file']} sets ExecStart)"
        return ""


def _is_same_process(identity: Mapping[str, Any], process: Mapping[str, Any]) -> bool:
    return (identity.get("pid"), identity.get("start_ticks")) == (process["pid"], process["start_ticks"])


def _complete(case: _Case) -> Iterator[Link]:
    """Whether everything could be read."""
    if case.evidence.get("changed_meanwhile"):
        reason = "the service was restarted while the evidence was gathered: run fab verify-worker again"
        yield Link("evidence", "one state", "changed meanwhile", "processes", "unknown", reason)
    problems = [entry for entry in _dicts(case.evidence.get("problems")) if entry["what"] not in NOT_ESSENTIAL]
    if problems:
        what, why = problems[0]["what"], problems[0]["why"]
        reason = f"{what} could not be read: {why}"
        if not case.evidence.get("privileged"):
            reason = (
                f"the login user may not use sudo, so that {what} could not be read: "
                "allow it `sudo python3` without a password, or log in as another user"
            )
        seen = f"{len(problems)} missing: {_list(entry['what'] for entry in problems)}"
        yield Link("evidence", "complete", seen, "host", "unknown", reason)


def _service(case: _Case) -> Iterator[Link]:
    """Whether a server runs, and has finished starting."""
    name, where = "service", "systemd"
    if case.unit is None:
        others = [process for process in _dicts(case.evidence.get("others")) if process["role"] == "main"]
        if case.main is None and len(others) > 1:
            pids = _list(process["pid"] for process in others)
            reason = (
                f"there is no such unit, and {len(others)} servers run (pids {pids}): name the unit by service_name"
            )
            yield Link(name, "one server", f"{len(others)} servers", "processes", "unknown", reason)
            return
        if case.main is None:
            reason = "no unit of this name and no process of SGLang's: deploy first, or set service_name"
            yield Link(name, "a server", "none", "systemd, processes", "refuted", reason)
            return
        yield Link(name, "a unit", f"process {case.main['pid']}, no unit", "processes", "not applicable")
    else:
        state = case.unit.get("ActiveState", "")
        seen = f"{state} ({case.unit.get('SubState')}), invocation {case.unit.get('InvocationID') or '-'}"
        if state in ("activating", "deactivating", "reloading"):
            reason = f"{case.unit_name} is {state}: wait, and run fab verify-worker again"
            yield Link(name, "active", seen, where, "unknown", reason)
            return
        if state != "active":
            reason = (
                f"{case.unit_name} is {state or 'absent'} ({case.unit.get('Result')}): nothing serves; see fab logs"
            )
            yield Link(name, "active", seen, where, "refuted", reason)
            return
        if case.main is None or case.main["role"] != "main":
            command = " ".join(case.options[:4]) or "nothing"
            reason = f"{case.unit_name} runs {command}, which is not SGLang's server{case.drop_in}"
            yield Link(name, "SGLang's server", command, where, "refuted", reason)
            return
        yield Link(name, "active", seen, where, "proved")


def _ready(case: _Case) -> Iterator[Link]:
    if case.main is None:
        return
    if case.start is not None and case.start.crashes and len(case.schedulers) < len(case.expected_ranks):
        reason = f"a scheduler crashed ({case.start.crashes[-1]}): see fab logs, then restart {case.unit_name}"
        yield Link("ready", "serving", "crashed", "log", "refuted", reason)
    elif not case.ready:
        age = max(0, round(case.evidence.get("collected_at", 0) - case.main.get("started_at", 0)))
        reason = (
            f"the server has not said that it is ready, {age} s after its start, and /server_info does not answer: "
            "it is still loading, or hangs; see fab logs"
        )
        yield Link("ready", "serving", f"loading for {age} s", "log, /server_info", "unknown", reason)


def _ranks(case: _Case) -> Iterator[Link]:
    """Whether the scheduler of every rank lives inside the service."""
    if case.main is None:
        return
    expected = case.expected_ranks
    missing = [rank for rank in expected if rank not in case.schedulers]
    seen = _list(f"rank {rank}: pid {process['pid']}" for rank, process in sorted(case.schedulers.items()))
    claimed = f"{len(expected)} scheduler(s)"
    if not missing:
        yield Link("ranks", claimed, seen, "processes", "proved")
    elif not case.ready:
        reason = f"the scheduler of rank {_list(missing)} has not started yet: run fab verify-worker again"
        yield Link("ranks", claimed, seen or "none", "processes", "unknown", reason)
    else:
        who = "every scheduler" if not case.schedulers else f"the scheduler of rank {_list(missing)}"
        reason = f"the main process lives but {who} is gone: nothing can be answered; restart {case.unit_name}"
        yield Link("ranks", claimed, seen or "none", "processes", "refuted", reason)


def _claim(case: _Case) -> Iterator[Link]:
    """Whether the active deployment is patched, and is the one that was started."""
    where = case.evidence.get("deployment_path", "deployment.json")
    claim = case.deployment
    if claim is None:
        seen = f"series {case.series}" if case.series else "none"
        yield Link("deployment", "none: not deployed by this project", seen, where, "not applicable")
        if case.manifest is None and case.main is not None:
            reason = (
                f"there is no patch series for SGLang {case.version or 'of unknown version'} in this checkout: "
                "nothing is known that these files could be compared with"
            )
            yield Link("series", "a known series", "none", "this checkout", "unknown", reason)
        return
    if claim.get("schema") != DEPLOYMENT_SCHEMA:
        reason = f"{where} is {claim.get('schema')!r}, this version reads {DEPLOYMENT_SCHEMA}: update this checkout"
        yield Link("deployment", DEPLOYMENT_SCHEMA, str(claim.get("schema")), where, "unknown", reason)
        return
    started = case.evidence.get("started_from")
    if started is not None and started != claim.get("id"):
        reason = f"`current` is deployment {claim.get('id')}, but the service was started from {started}: restart it"
        yield Link("deployment", str(claim.get("id")), str(started), where, "refuted", reason)
    elif claim.get("series") is None:
        reason = "the active deployment is not patched: deploy with the patch"
        yield Link("deployment", "a patch series", "none", where, "refuted", reason)
    elif case.manifest is None:
        reason = "the release has no manifest of its patch series: deploy again"
        yield Link("deployment", str(claim["series"]), "no manifest", where, "unknown", reason)
    elif case.series != claim["series"]:
        reason = f"the deployment claims series {claim['series']}, its release holds {case.series}: deploy again"
        yield Link("deployment", str(claim["series"]), str(case.series), where, "refuted", reason)
    else:
        yield Link("deployment", f"{claim.get('id')}", f"series {case.series}", where, "proved")
        yield from _shipped(case)


def _shipped(case: _Case) -> Iterator[Link]:
    """Whether the release's manifest is the one that this checkout ships under that name."""
    for manifest in _dicts(case.evidence.get("reference")):
        if manifest.get("series") == case.series and case.manifest and manifest != case.manifest[0]:
            reason = "the manifest in the release was changed after it was installed: deploy again"
            yield Link("manifest", "as shipped", "changed", case.manifest[1], "refuted", reason)


def _program(case: _Case) -> Iterator[Link]:
    """Whether the interpreter is the release's."""
    if case.main is None or case.deployment is None:
        return
    claimed, seen = str(case.deployment.get("python")), (case.options or [""])[0]
    where = f"command line of process {case.main['pid']}"
    # The release's own scripts start python3 or python3.11 beside python.
    if os.path.dirname(seen) == os.path.dirname(claimed):
        yield Link("interpreter", claimed, seen, where, "proved")
    else:
        reason = (
            f"the service runs {seen}, while the patch is in {case.deployment.get('release_path')}{case.drop_in}: "
            "start the release's interpreter, or deploy again"
        )
        yield Link("interpreter", claimed, seen, where, "refuted", reason)


def _arguments(case: _Case) -> Iterator[Link]:
    """Whether the running process has the arguments that the deployment claims (the threshold is a link of its own)."""
    if case.main is None or case.deployment is None:
        return
    claimed = case.deployment.get("server_arguments")
    if not isinstance(claimed, Mapping):
        return
    where = f"command line of process {case.main['pid']}"
    for name, value in claimed.items():
        option = f"--{name}"
        seen = option_words(case.options, option)
        if option == THRESHOLD_OPTION or seen == ["***"] or seen == claimed_words(value):
            continue
        text = "absent" if seen is None else " ".join(seen) or "present"
        reason = (
            f"the process runs with {option} {text}, the deployment says {_text(value)}{case.drop_in}: "
            f"restart {case.unit_name}, or deploy again"
        )
        yield Link("arguments", f"{option} {_text(value)}", text, where, "refuted", reason)
        return
    yield Link("arguments", f"{len(claimed)} as deployed", "the same", where, "proved")


def option_words(command: Sequence[str], option: str) -> list[str] | None:
    """The words that follow the last `option` in a command line; None when it is absent."""
    words: list[str] | None = None
    collecting = False
    for word in command:
        if word == option:
            words, collecting = [], True
        elif word.startswith(option + "="):
            words, collecting = [word[len(option) + 1 :]], False
        elif word.startswith("--"):
            collecting = False
        elif collecting and words is not None:
            words.append(word)
    return words


def claimed_words(value: Any) -> list[str] | None:
    """The words that the service's unit has for an argument's value; None when it leaves the option out."""
    if value is None or value is False:
        return None
    if value is True:
        return []
    if isinstance(value, Mapping):
        return [json.dumps(value)]
    return [str(item) for item in value] if isinstance(value, list) else [str(value)]


def _worker(case: _Case) -> Iterator[Link]:
    """Whether the patch is in the file of the worker that the configuration selects and the ranks run."""
    if case.main is None:
        return
    patched = [file["module"] for file in case.manifest[0]["files"]] if case.manifest else None
    chosen: str | None = None
    if case.arguments is None:
        reason = (
            "the server's arguments are neither in the log (rotated?) nor answered by /server_info: "
            "the worker that they select cannot be told"
        )
        yield Link(
            "worker", "the class that the arguments select", "no arguments", "log, /server_info", "unknown", reason
        )
    else:
        arguments, where = case.arguments
        try:
            chosen, why = selected_worker(arguments, case.version)
        except KeyError as error:
            reason = f"{where} does not name the argument {error}: update this checkout for SGLang {case.version}"
            yield Link("worker", "", "", where, "unknown", reason)
            return
        if chosen is None:
            reason = (
                "this server runs without speculative decoding: there is nothing to gate; set speculative-algorithm"
            )
            yield Link("worker", "a speculative worker", "none", where, "refuted", reason)
            return
        module = WORKER_MODULES.get(chosen, chosen)
        if patched is not None and module not in patched:
            reason = _wrong_file(patched, chosen, module, f", because {why}")
            seen = _list(map(_file_name, patched))
            yield Link("worker", f"{chosen} in {_file_name(module)}", f"patched: {seen}", where, "refuted", reason)
            return
    for rank, (identity, _, where) in sorted(case.identities.items()):
        seen = str(identity.get("worker"))
        if chosen is not None and seen != chosen:
            reason = f"rank {rank} runs {seen}, but its arguments select {chosen}: deploy again"
            yield Link("worker", chosen, seen, where, "refuted", reason)
        elif patched is not None and identity.get("worker_module") not in patched:
            module = str(identity.get("worker_module"))
            reason = _wrong_file(patched, seen, module, "")
            yield Link("worker", _list(map(_file_name, patched)), _file_name(module), where, "refuted", reason)
        elif chosen is not None:
            yield Link("worker", f"{chosen}, because {why}", f"rank {rank}: {seen}", where, "proved")


def _wrong_file(patched: Sequence[str], worker: str, module: str, because: str) -> str:
    workers = [name for name in patched if name in WORKER_MODULES.values()] or list(patched)
    files = _list(map(_file_name, workers)) or "no file of the worker's"
    version = "v2" if worker.endswith("V2") else "v1"
    other = "choose top-k above 1" if version == "v2" else "set top-k 1"
    return (
        f"the patch is in {files}, but these processes run {worker} from {_file_name(module)}{because}. "
        f"Deploy with the {version} series or {other}."
    )


def _files(case: _Case) -> Iterator[Link]:
    """Whether the serving interpreter imports each patched file, unchanged, from the release."""
    if case.main is None or case.manifest is None:
        return
    manifest, claimed_by = case.manifest
    if case.interpreter is None:
        reason = _first_problem(case, "the files that the serving interpreter imports")
        yield Link("files", claimed_by, "not examined", "host", "unknown", reason)
        return
    site = (case.evidence.get("release") or {}).get("site_packages")
    modules = case.interpreter.get("modules") or {}
    for file in manifest["files"]:
        name, found = file["module"], modules.get(file["module"]) or {}
        path, digest = found.get("file"), found.get("sha256")
        claimed_path = os.path.join(site, file["path"]) if site else None
        claimed = f"{claimed_path or file['path']} {file['patched_sha256'][:12]}"
        seen = f"{path} {str(digest)[:12]}"
        link = ("file " + _file_name(name), claimed, seen, "the serving interpreter's path")
        if path is None:
            yield Link(*link, "refuted", f"the serving interpreter finds no module {name}: deploy again")
        elif claimed_path is not None and os.path.normpath(path) != os.path.normpath(claimed_path):
            reason = (
                f"the patched file is {claimed_path}, but the serving interpreter imports {path} "
                f"({_why_first(case, path, file['path'])}): remove that copy, or take it off the path, and restart"
            )
            yield Link(*link, "refuted", reason)
        elif digest is None:
            yield Link(*link, "unknown", f"{path} could not be read: {found.get('error')}")
        elif digest != file["patched_sha256"]:
            yield Link(*link, "refuted", _changed_file(case, path, file, digest))
        elif _stale_compiled(found):
            compiled = found["compiled"]
            reason = (
                f"{path} is patched, but the interpreter uses its compiled file {compiled['file']} "
                f"({compiled['kind']}), which is of other code: delete that file and restart {case.unit_name}"
            )
            yield Link(*link, "refuted", reason)
        else:
            yield Link(*link, "proved")


def _stale_compiled(found: Mapping[str, Any]) -> bool:
    compiled = found.get("compiled")
    return bool(compiled and compiled.get("used") and compiled.get("code_sha256") != found.get("source_code_sha256"))


def _why_first(case: _Case, path: str, relative: str) -> str:
    """Where the entry of sys.path comes from below which `path` was found."""
    interpreter = case.interpreter or {}
    entry = path.removesuffix(relative).rstrip("/") or "/"
    environment = (case.main or {}).get("environment") or {}
    if entry not in [part.rstrip("/") or "/" for part in interpreter.get("path", []) if part]:
        return "an editable install: its finder is asked before the path"
    if entry in (environment.get("PYTHONPATH") or "").split(":"):
        return "it is on PYTHONPATH"
    if entry == (case.main or {}).get("cwd"):
        return "it is below the working directory"
    if "/.local/" in entry:
        return "it is in the service user's own site-packages"
    if "site-packages" in entry or "dist-packages" in entry:
        return "it is in another environment"
    return f"{entry} is on the path by a .pth file"


def _changed_file(case: _Case, path: str, file: Mapping[str, Any], digest: str) -> str:
    loaded = " The ranks still run what they loaded before." if case.identities else ""
    installed = (case.interpreter or {}).get("sglang_version")
    expected = case.manifest[0]["sglang_version"] if case.manifest else None
    if installed is not None and installed != expected:
        return f"SGLang was changed from {expected} to {installed} after it was patched: deploy again.{loaded}"
    if digest == file["upstream_sha256"]:
        return f"{path} is SGLang's own file, without the patch: deploy with the patch.{loaded}"
    return f"{path} is neither SGLang's nor the patched file: somebody changed it; deploy again.{loaded}"


def _loaded(case: _Case) -> Iterator[Link]:
    """Whether each rank itself says that it loaded the patched code."""
    if case.main is None:
        return
    for rank in case.expected_ranks:
        if rank not in case.schedulers:
            continue
        if rank not in case.identities:
            state, reason = _no_identity(case, rank)
            yield Link(
                f"loaded, rank {rank}", "the patched files", "no word from this rank", "status file", state, reason
            )
            continue
        yield from _loaded_modules(case, rank)


def _no_identity(case: _Case, rank: int) -> tuple[State, str]:
    process = case.schedulers[rank]
    names = {file["module"] for file in case.manifest[0]["files"]} if case.manifest else set()
    found = [entry for name, entry in ((case.interpreter or {}).get("modules") or {}).items() if name in names]
    newest = max((max(entry.get("mtime", 0), entry.get("ctime", 0)) for entry in found), default=0)
    if case.start is not None and any(_is_same_process(identity, process) for identity in case.start.identities):
        return "unknown", (
            f"rank {rank} printed its identity but keeps no status file, and a log proves nothing: "
            "start the server with RUNTIME_DIRECTORY or SPEC_GATE_RUNTIME_DIRECTORY set"
        )
    stale = f" ({case.stale_files[0]} is of a former process)" if case.stale_files else ""
    if found and newest > process.get("started_at", newest):
        return "refuted", (
            f"the files were patched after rank {rank} had started, so it runs the old code{stale}: "
            f"restart {case.unit_name}"
        )
    if not case.ready:
        return "unknown", f"rank {rank} has not reported yet{stale}: run fab verify-worker again"
    if case.start is not None and case.start.arguments_complete and case.start.ready:
        return "refuted", (
            f"rank {rank} neither keeps a status file nor printed its identity while it started{stale}: "
            f"it runs without the patch; deploy, or restart {case.unit_name}"
        )
    return "unknown", (
        f"rank {rank} keeps no status file{stale}, and its log does not reach back to its start: "
        f"restart {case.unit_name}"
    )


def _loaded_modules(case: _Case, rank: int) -> Iterator[Link]:
    identity, _, where = case.identities[rank]
    name = f"loaded, rank {rank}"
    if identity.get("tp_size") not in (None, len(case.expected_ranks)) and case.arguments is None:
        reason = f"rank {rank} is one of {identity['tp_size']}, not of {len(case.expected_ranks)}: see fab logs"
        yield Link(name, f"{len(case.expected_ranks)} ranks", str(identity["tp_size"]), where, "unknown", reason)
    loaded = {entry.get("module"): entry for entry in _dicts(identity.get("modules"))}
    if case.manifest is None:
        return
    for file in case.manifest[0]["files"]:
        module = file["module"]
        entry = loaded.get(module)
        label = f"{name}, {_file_name(module)}"
        if entry is None:
            # The file of a worker class that this configuration does not select is patched but never imported.
            if module in WORKER_MODULES.values() and module != identity.get("worker_module"):
                continue
            reason = f"rank {rank} did not load the patched {_file_name(module)}: restart {case.unit_name}"
            yield Link(label, f"series {case.series}", "not loaded", where, "refuted", reason)
            continue
        if entry.get("series") != case.series:
            reason = (
                f"rank {rank} loaded series {entry.get('series')}, claimed is {case.series}: restart {case.unit_name}"
            )
            yield Link(label, f"series {case.series}", f"series {entry.get('series')}", where, "refuted", reason)
            continue
        yield _loaded_code(case, rank, label, entry)


def _loaded_code(case: _Case, rank: int, label: str, entry: Mapping[str, Any]) -> Link:
    where = case.identities[rank][2]
    on_disk = ((case.interpreter or {}).get("modules") or {}).get(entry["module"]) or {}
    seen_hash, path = str(entry.get("code_sha256")), on_disk.get("file")
    source_hash = on_disk.get("source_code_sha256")
    claimed = f"{path} code {str(source_hash)[:12]}"
    seen = f"{entry.get('file')} code {seen_hash[:12]}"
    if case.interpreter is None or path is None or source_hash is None:
        reason = f"what rank {rank} loaded cannot be compared: " + (
            str(on_disk.get("error")) if on_disk.get("error") else "the serving interpreter was not examined"
        )
        return Link(label, "code of the file on disk", seen, where, "unknown", reason)
    if os.path.realpath(str(entry.get("file"))) != os.path.realpath(path):
        reason = f"rank {rank} loaded {entry.get('file')}, while the patched file is {path}: restart {case.unit_name}"
        return Link(label, claimed, seen, where, "refuted", reason)
    if seen_hash != source_hash:
        compiled = on_disk.get("compiled") or {}
        if compiled.get("code_sha256") == seen_hash:
            reason = (
                f"rank {rank} loaded the compiled file {compiled['file']} ({compiled['kind']}), which is not of the "
                f"patched source: delete it and restart {case.unit_name}"
            )
        else:
            reason = f"{path} was changed after rank {rank} had loaded it: restart {case.unit_name}, or deploy again"
        return Link(label, claimed, seen, where, "refuted", reason)
    return Link(label, claimed, seen, where, "proved")


def _threshold(case: _Case) -> Iterator[Link]:
    """Whether the threshold is the same in the deployment, on the command line and in every rank."""
    if case.main is None or not case.identities:
        return
    words = option_words(case.options, THRESHOLD_OPTION)
    on_line = int(words[0]) if words and words[0].lstrip("-").isdigit() else None
    claimed = case.deployment.get("threshold") if case.deployment else on_line
    claim_text = f"{_text(claimed)} ({'deployment.json' if case.deployment else 'command line'})"
    if case.deployment and (claimed or 0) != (on_line or 0):
        reason = (
            f"the deployment says threshold {_text(claimed)}, the running process was started with "
            f"{_text(on_line)}{case.drop_in}: restart {case.unit_name}, or deploy again"
        )
        yield Link("threshold", claim_text, f"command line {_text(on_line)}", "processes", "refuted", reason)
        return
    for rank, (identity, gate, where) in sorted(case.identities.items()):
        seen = gate.get("threshold", identity.get("threshold"))
        if (seen or 0) == (claimed or 0):
            yield Link(f"threshold, rank {rank}", claim_text, _text(seen), where, "proved")
        else:
            how = "changed while it ran" if (identity.get("threshold") or 0) == (claimed or 0) else "is another one"
            reason = (
                f"the threshold of rank {rank} is {_text(seen)}, claimed is {_text(claimed)} (it {how}): "
                f"set it back or restart {case.unit_name}"
            )
            yield Link(f"threshold, rank {rank}", claim_text, _text(seen), where, "refuted", reason)


def _answers(case: _Case) -> Iterator[Link]:
    """Whether the server's port is answered by this server, in this version."""
    if case.main is None:
        return
    port, listener = case.server.get("port"), case.server.get("listener")
    claimed = f"port {port}"
    if listener is None:
        reason = f"nobody listens on port {port}: the server is still loading or hangs; see fab logs"
        yield Link("answers", claimed, "nobody listens", "sockets", "unknown", reason)
    elif listener.get("inside") is None:
        reason = f"it cannot be seen whose port {port} is: gather the evidence with sudo"
        yield Link("answers", claimed, "owner not visible", "sockets", "unknown", reason)
    elif not listener["inside"]:
        who = f"{' '.join(listener.get('command', [])[:3])} (pid {listener['pid']})"
        reason = f"port {port} is answered by another program, {who}: stop it, or give the service another port"
        yield Link("answers", claimed, who, "sockets", "refuted", reason)
    elif case.info is None:
        reason = (
            f"/server_info gave no answer ({case.server.get('error')}): the server is loading or hangs; see fab logs"
        )
        yield Link("answers", claimed, str(case.server.get("error")), "/server_info", "unknown", reason)
    elif case.manifest is not None and case.info.get("version") != case.manifest[0]["sglang_version"]:
        expected = case.manifest[0]["sglang_version"]
        reason = f"the server is SGLang {case.info.get('version')}, the patch is for {expected}: deploy again"
        yield Link("answers", f"SGLang {expected}", str(case.info.get("version")), "/server_info", "refuted", reason)
    elif (disagreement := _disagreement(case)) is not None:
        yield Link("answers", "the gate's identity", disagreement, "/server_info", "unknown", disagreement)
    else:
        seen = f"pid {listener['pid']}, SGLang {case.info.get('version')}"
        yield Link("answers", claimed, seen, "sockets, /server_info", "proved")


def _disagreement(case: _Case) -> str | None:
    """How what /server_info says of rank 0 and its status file contradict each other."""
    answered = [gate.get("identity") for gate in _dicts((case.info or {}).get("gates"))]
    for identity, _, where in case.identities.values():
        if identity.get("tp_rank") == 0 and identity not in answered:
            what = "another identity than" if answered else "no identity, unlike"
            return f"/server_info gives {what} {where}: restart {case.unit_name} and run fab verify-worker again"
    return None


def _log(case: _Case) -> Iterator[Link]:
    """Whether the log of the running start agrees; it may have been rotated, and proves nothing by itself."""
    if case.main is None:
        return
    where = str((case.evidence.get("log") or {}).get("source") or "log")
    start = case.start
    if start is None or not start.arguments_complete:
        yield Link("log", "identity of each rank", "does not reach back to the start", where, "not applicable")
        return
    if not start.ready:
        return
    silent = [
        rank
        for rank in case.expected_ranks
        if rank in case.identities
        and not any(_is_same_process(identity, case.schedulers[rank]) for identity in start.identities)
    ]
    if silent and not start.torn_identities:
        reason = (
            f"rank {_list(silent)} keeps a status file but did not print its identity when it started: the two "
            f"disagree; restart {case.unit_name} and run fab verify-worker again"
        )
        yield Link("log", "identity of each rank", f"none from rank {_list(silent)}", where, "unknown", reason)
    elif len(case.identities) == len(case.expected_ranks):
        yield Link("log", "identity of each rank", f"{len(start.identities)} identity line(s)", where, "proved")


_CHAIN = (
    _complete,
    _service,
    _claim,
    _program,
    _ranks,
    _ready,
    _arguments,
    _worker,
    _files,
    _loaded,
    _threshold,
    _answers,
    _log,
)


def _notes(case: _Case) -> Iterator[str]:
    """What does not change the verdict but may explain the next surprise."""
    others = _dicts(case.evidence.get("others"))
    mains = {process["pid"] for process in others if process["role"] == "main"}
    if case.main is not None:
        for process in others:
            if process["role"] == "main":
                yield f"another server runs on this host: pid {process['pid']}, {process['cgroup'] or 'no unit'}"
            elif process["role"] == "scheduler" and process["ppid"] not in mains:
                yield f"an orphaned scheduler of a former server lives, and may hold GPU memory: pid {process['pid']}"
    inside = {process["pid"] for process in case.processes}
    for owner in _dicts(case.evidence.get("gpu_owners")):
        if owner["pid"] not in inside:
            yield f"GPU memory is held by a process outside the service: pid {owner['pid']}, {owner['used_mib']} MiB"
    if (case.unit or {}).get("NeedDaemonReload") == "yes":
        yield "the unit's files changed since systemd read them (systemctl daemon-reload)"
    for name, found in ((case.interpreter or {}).get("modules") or {}).items():
        for copy in found.get("copies") or []:
            if copy["file"] != found.get("file"):
                yield f"a second copy of {_file_name(name)} is on the path, not used: {copy['file']}"
    for file in case.stale_files:
        yield f"{file} is of a process that is not this server's, or ended"
    facts = (case.evidence.get("log") or {}).get("facts")
    if facts:
        fields = {name: facts[name] for name in ("bytes", "recognised", "starts", "imitations", "truncated")}
        yield from _log_notes(LogFacts(**fields))
    if case.start is not None and case.start.stop_signals:
        yield f"the server received {case.start.stop_signals[-1]}: it is draining"


def _first_problem(case: _Case, what: str) -> str:
    for entry in _dicts(case.evidence.get("problems")):
        if entry["what"] == what:
            return f"{what} could not be examined: {entry['why']}"
    return f"{what} could not be examined"


def _dicts(value: Any) -> list[Mapping[str, Any]]:
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list | tuple) else []


def _list(items: Any) -> str:
    return ", ".join(str(item) for item in items)


def _text(value: Any) -> str:
    return "none" if value is None else str(value)


def _file_name(module: str) -> str:
    return module.rpartition(".")[2] + ".py"


def _release(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: (0, 5, 12) for 0.5.12.post1."""
    numbers: list[int] = []
    for part in version.split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)
