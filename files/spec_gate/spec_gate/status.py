"""What the gate tells the outside: one identity line, a line per transition, and a status file per rank.

Nothing here raises into the server: a gate that cannot report must not stop the service that it reports on.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from spec_gate import loaded
from spec_gate.policy import Policy

IDENTITY_SCHEMA = "spec_gate.identity/1"
RANK_SCHEMA = "spec_gate.rank/1"

FILE_INTERVAL_S = 1.0
TRANSITION_INTERVAL_S = 1.0

logger = logging.getLogger(__name__)


def runtime_directory(environment: Mapping[str, str] = os.environ) -> Path | None:
    """The folder of the status files: systemd's $RUNTIME_DIRECTORY, else $SPEC_GATE_RUNTIME_DIRECTORY, else none."""
    # systemd separates several runtime directories by colons; the unit's own is the first.
    given = environment.get("RUNTIME_DIRECTORY", "").split(":")[0] or environment.get("SPEC_GATE_RUNTIME_DIRECTORY")
    return Path(given) if given else None


def identity(policy: Policy, *, worker: type, tp_rank: int, tp_size: int, sglang_version: str) -> dict[str, object]:
    """Who this process is and which code it has loaded, as of now."""
    modules = loaded.registered()
    series = sorted({module.series for module in modules})
    return {
        "schema": IDENTITY_SCHEMA,
        "pid": os.getpid(),
        "start_ticks": _start_ticks(),
        "tp_rank": tp_rank,
        "tp_size": tp_size,
        "worker": worker.__name__,
        "worker_module": worker.__module__,
        "sglang_version": sglang_version,
        "series": ",".join(series),  # one id, unless the files are of different series: then the reader must see it
        "threshold": policy.settings.threshold,
        "policy": policy.settings.describe(),
        "modules": [module.describe() for module in modules],
    }


def gate(policy: Policy, running: int) -> dict[str, object]:
    """The gate's state as /server_info and the status file show it; `running` as of the last decision.

    `profile` is the id of the profile that the gate closes and opens by: None while there is none or a threshold wins.
    """
    settings, rule = policy.settings, policy.by_profile
    return {
        "mode": policy.mode,
        "threshold": settings.threshold,
        "transitions": policy.transitions,
        "open_steps": policy.open_steps,
        "closed_steps": policy.closed_steps,
        "reason": policy.reason,
        "running": running,
        "forced": settings.forced,
        "profile": settings.profile.id if settings.profile is not None and settings.threshold == 0 else None,
        "acceptance": _rounded(rule.acceptance) if rule is not None else None,
        "break_even": _rounded(rule.break_even) if rule is not None else None,
        "passed_probes": rule.passed_probes if rule is not None else 0,
        "failed_probes": rule.failed_probes if rule is not None else 0,
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


class Reporter:
    """Reports for one rank. `clock` gives monotonic seconds."""

    def __init__(
        self, identity: Mapping[str, object], directory: Path | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.identity = identity
        self._rank = identity["tp_rank"]
        self._file = directory / f"rank-{self._rank}.json" if directory else None
        self._clock = clock
        self._next_write = self._next_line = clock()
        self._line: dict[str, object] | None = None  # the latest transition, not yet logged
        self._suppressed = 0
        self._failed = False
        logger.info("spec_gate identity %s", json.dumps(identity))

    def transition(self, state: Mapping[str, object], step: int) -> None:
        """Log a transition to `state` (rank 0 only) and bring the status file up to date.

        At most one line in TRANSITION_INTERVAL_S: of several the last is logged, and says how many it stands for.
        """
        self._write(state)
        if self._rank == 0:
            self._suppressed += self._line is not None
            self._line = {
                "to": "closed" if state["mode"] == "closed" else "open",
                "step": step,
                "running": state["running"],
                "reason": state["reason"],
                "tp_rank": self._rank,
            }
            self._log_line()

    def tick(self, state: Callable[[], Mapping[str, object]]) -> None:
        """Report what is due. To be called at each step boundary; `state` is called once in FILE_INTERVAL_S at most."""
        if self._line is not None:
            self._log_line()
        if self._file is not None and self._clock() >= self._next_write:
            self._write(state())

    def _log_line(self) -> None:
        if self._line is None or self._clock() < self._next_line:
            return
        if self._suppressed:
            self._line["suppressed"] = self._suppressed
        logger.info("spec_gate transition %s", json.dumps(self._line))
        self._line, self._suppressed = None, 0
        self._next_line = self._clock() + TRANSITION_INTERVAL_S

    def _write(self, state: Mapping[str, object]) -> None:
        if self._file is None:
            return
        self._next_write = self._clock() + FILE_INTERVAL_S
        document = {"schema": RANK_SCHEMA, "identity": self.identity, "gate": state, "updated": time.time()}
        new = self._file.with_suffix(".json.new")
        try:
            new.write_text(json.dumps(document), encoding="utf-8")
            new.replace(self._file)
            self._failed = False
        except OSError as error:
            if not self._failed:  # once until it works again: a full disk must not fill the log as well
                logger.warning("spec_gate cannot write %s: %s; serving goes on without it", self._file, error)
            self._failed = True


def _start_ticks() -> int:
    """When this process started, in clock ticks since boot: with the pid it names a process for good."""
    # The second field, the command's name, may contain spaces and parentheses: count from its end, at field 3.
    return int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[22 - 3])
