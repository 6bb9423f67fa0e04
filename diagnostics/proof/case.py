"""The evidence about one host, with what follows from it by itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

from diagnostics.proof.link import dicts
from diagnostics.proof.logs import Start
from diagnostics.proof.worker import selected_worker

IDENTITY_SCHEMA = "spec_gate.identity/1"


MOST_RANKS = 4096


class Case:
    """The evidence of one host, with what follows from it by itself.

    `speculation` says whether the server is meant to speculate.
    """

    def __init__(self, evidence: Mapping[str, Any], speculation: bool = True) -> None:
        self.evidence = evidence
        self.speculation = speculation
        self.unit: Mapping[str, Any] | None = evidence.get("unit")
        self.unit_name: str = (self.unit or {}).get("Id") or "the service"
        self.deployment: Mapping[str, Any] | None = evidence.get("deployment")
        self.interpreter: Mapping[str, Any] | None = evidence.get("interpreter")
        self.server: Mapping[str, Any] = evidence.get("server") or {}
        self.processes: list[Mapping[str, Any]] = dicts(evidence.get("processes"))

    @cached_property
    def main(self) -> Mapping[str, Any] | None:
        """The server's main process, alive."""
        found = (process for process in self.processes if process["pid"] == self.evidence.get("main_pid"))
        return next((process for process in found if process["state"] != "Z"), None)

    @cached_property
    def _living(self) -> list[Mapping[str, Any]]:
        return [
            process for process in self.processes if process["role"] == "scheduler" and process["state"] not in "ZX"
        ]

    @cached_property
    def schedulers(self) -> dict[int, Mapping[str, Any]]:
        """The living scheduler processes by their rank."""
        return {process["tp_rank"]: process for process in self._living}

    @cached_property
    def ranks_are_unique(self) -> bool:
        """Whether no two schedulers have the same tensor-parallel rank, as with data or pipeline parallelism."""
        return len(self.schedulers) == len(self._living)

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
            return sorted({0, *self.schedulers})
        here = size // nodes
        first = here * int(arguments.get("node_rank") or 0)
        # Without arguments the size is a guess: a rank that is there counts as well.
        return sorted({*range(first, first + here), *self.schedulers})

    @cached_property
    def manifest(self) -> tuple[Mapping[str, Any], str] | None:
        """The manifest of the claimed series and where it was read."""
        if self.evidence.get("manifest"):
            return self.evidence["manifest"], "the manifest beside the gate"
        for manifest in dicts(self.evidence.get("reference")):
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
            if isinstance(rank, int) and process is not None and is_same_process(identity, process):
                found.setdefault(rank, (identity, gate, where))
        return found

    def _claims_of_ranks(self) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any], str]]:
        for entry in dicts(self.evidence.get("rank_files")):
            content = entry.get("document") or {}
            identity, gate = content.get("identity"), content.get("gate")
            if isinstance(identity, Mapping) and identity.get("schema") == IDENTITY_SCHEMA:
                yield identity, gate if isinstance(gate, Mapping) else {}, entry["file"]
        for gate in dicts((self.info or {}).get("gates")):
            identity = gate.get("identity")
            if isinstance(identity, Mapping) and identity.get("schema") == IDENTITY_SCHEMA:
                yield identity, gate, "/server_info"

    @cached_property
    def stale_files(self) -> list[str]:
        """Status files of processes that are not this server's, or no longer."""
        current = {where for _, _, where in self.identities.values()}
        return [entry["file"] for entry in dicts(self.evidence.get("rank_files")) if entry["file"] not in current]

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
    def profile_seen(self) -> Any:
        """The profile that the gates go by, if the ranks agree."""
        found = {gate.get("profile") for _, gate, _ in self.identities.values()}
        return found.pop() if len(found) == 1 else None

    @cached_property
    def options(self) -> list[str]:
        """The main process's command line."""
        return list((self.main or {}).get("command") or [])

    @cached_property
    def drop_in(self) -> str:
        """A remark on a drop-in that replaces the command line, for the sentence that needs one."""
        for entry in dicts((self.unit or {}).get("drop_ins")):
            if "ExecStart" in entry.get("settings", []):
                return f" (the drop-in {entry['file']} sets ExecStart)"
        return ""


def is_same_process(identity: Mapping[str, Any], process: Mapping[str, Any]) -> bool:
    """Whether an identity is that of this very process: pids are used again, start times are not."""
    return (identity.get("pid"), identity.get("start_ticks")) == (process["pid"], process["start_ticks"])
