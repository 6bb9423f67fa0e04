"""The gate in a scheduler process: asks the policy before each decode step, acts on it, and reports.

The patched modules of SGLang call into this module only.
"""

from __future__ import annotations

import logging
from typing import Any

import sglang

from spec_gate import arguments, status
from spec_gate.one_node_verify import OneNodeVerify
from spec_gate.policy import Policy

logger = logging.getLogger(__name__)


class Gate:
    """One gate per scheduler process, that is per tensor-parallel rank."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        worker = scheduler.draft_worker or scheduler.tp_worker
        self._policy = Policy(arguments.settings(scheduler.server_args))
        self._running = 0
        threshold = self._policy.settings.threshold
        self._mechanism = OneNodeVerify(worker) if threshold else None
        if threshold:
            # Without a threshold the worker never hears of the gate.
            worker.spec_gate = self
        if threshold > scheduler.max_running_requests:
            logger.warning(
                "The gate can never close: its threshold is %d and at most %d requests run; raise "
                "--max-running-requests or lower the threshold",
                threshold,
                scheduler.max_running_requests,
            )
        identity = status.identity(
            self._policy,
            worker=type(worker),
            tp_rank=scheduler.tp_rank,
            tp_size=scheduler.tp_size,
            sglang_version=sglang.__version__,
        )
        self._reporter = status.Reporter(identity, status.runtime_directory())

    def at_boundary(self) -> None:
        """Between two steps of the scheduler, an idle server's too: open when no request is left, and report."""
        if self._policy.mode == "closed" and not self._any_unfinished():
            self._decide(running=0, kv_tokens=0)
        self._reporter.tick(self._state)

    def draft(self, batch: Any) -> Any:
        """The verify input of a decode step: the draft's tree while open, the one node while closed."""
        # Filled in for the second trigger only: the sum costs more than the decision.
        kv_tokens = int(batch.seq_lens_cpu.sum()) if self._policy.settings.kv_token_threshold else 0
        self._decide(batch.batch_size(), kv_tokens)
        return self._mechanism.draft(batch)

    def describe(self) -> dict[str, object]:
        """The block `spec_gate` of /server_info."""
        return self._state() | {"identity": self._reporter.identity}

    def _decide(self, running: int, kv_tokens: int) -> None:
        self._running = running
        decision = self._policy.decide(running, kv_tokens)
        if decision.changed:
            self._mechanism.switch(closed=decision.mode == "closed")
            self._reporter.transition(self._state(), self._policy.steps)

    def _state(self) -> dict[str, object]:
        return status.gate(self._policy, self._running)

    def _any_unfinished(self) -> bool:
        # The last batch's prefilled requests join the running batch in the next step only.
        last = self._scheduler.last_batch
        batches = [self._scheduler.running_batch, *([last] if last and last.forward_mode.is_extend() else [])]
        return any(not request.finished() for batch in batches for request in batch.reqs)
