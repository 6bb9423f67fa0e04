"""The gate in a scheduler process: asks the policy before each decode step, acts on it, and reports.

The patched modules of SGLang call into this module only.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

import sglang

from spec_gate import arguments, metrics, status
from spec_gate.policy import Policy, SettingsError
from spec_gate.server_key import server_key
from spec_gate.switch import Switch

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler import Scheduler

logger = logging.getLogger(__name__)


class Gate:
    """One gate per scheduler process, that is per tensor-parallel rank.

    Without a threshold and a profile it reports who the process is, and the scheduler runs as released.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._policy = Policy(arguments.settings(scheduler.server_args))
        self._running = 0
        self._decided = False
        settings = self._policy.settings
        threshold = settings.threshold
        self._switch = Switch(scheduler, arguments.sync_interval(scheduler.server_args)) if settings.gated else None
        self._key = server_key(scheduler.server_args) if settings.gated else None
        if threshold and settings.profile is not None:
            logger.info("The gate does not use profile %s while threshold %d is set", settings.profile.id, threshold)
        if threshold > scheduler.max_running_requests:
            logger.warning(
                "The gate can never close: its threshold is %d and at most %d requests run; raise "
                "--max-running-requests or lower the threshold",
                threshold,
                scheduler.max_running_requests,
            )
        identity = status.identity(
            self._policy,
            worker=type(scheduler.draft_worker or scheduler.tp_worker),
            tp_rank=scheduler.tp_rank,
            tp_size=scheduler.tp_size,
            sglang_version=sglang.__version__,
        )
        self._reporter = status.Reporter(identity, status.runtime_directory())
        self._metrics = None
        if self._switch is not None and scheduler.enable_metrics:
            self._metrics = metrics.Metrics(scheduler.metrics_collector.labels)

    def report(self) -> None:
        """Between two steps of the scheduler, an idle server's too."""
        self._reporter.tick(self._state)
        if self._metrics is not None:
            self._metrics.update(self._state)

    def switched(self) -> bool:
        """Before the scheduler schedules: decide and switch it. True when its event loop must be entered anew.

        A server without requests is switched when its next decode batch is there: its prompts are prefilled no slower
        by the closed server, and a burst that would close the gate again has then cost no switch.
        """
        if self._switch is None:
            return False
        if self._decided:  # for this step, before the loop was entered anew
            self._decided = False
            return False
        s = self._scheduler
        last = s.last_batch
        prefilled = last is not None and last.forward_mode.is_extend()
        if prefilled and (s.waiting_queue or s.chunked_req is not None or last.chunked_req is not None):
            return False  # more prefill follows: no decode step is to be decided
        # The prefilled requests join the running batch in the next step only.
        reqs = _unfinished(s.running_batch.reqs) + (_unfinished(last.reqs) if prefilled else [])
        self._running = len(reqs)
        # Summed where it counts only: the sum costs more than the decision.
        kv_tokens = sum(req.seqlen for req in reqs) if self._policy.settings.needs_kv_tokens else 0
        decision = self._policy.decide(len(reqs), kv_tokens)
        if decision.changed:
            self._reporter.transition(self._state(), self._policy.steps)
        closed = decision.mode == "closed"
        if not reqs or closed == self._switch.closed:
            return False
        self._switch.to(closed)
        self._decided = True
        return True

    def verified(self, requests: int, correct_drafts: int) -> None:
        """After a verify step, when the scheduler has its result: so many drafted tokens were right, of all requests.

        In the overlap loop the scheduler has it one step later; on every rank at the same place in its loop.
        """
        if self._switch is None:
            return
        self._policy.observe(requests, requests + correct_drafts)
        self._switch.verified(requests, requests + correct_drafts)

    @property
    def setting_names(self) -> set[str]:
        """The names under which /set_internal_state takes the policy's settings: those of ServerArgs."""
        return set(arguments.FIELDS.values()) if self._switch is not None else set()

    def change_settings(self, changes: Mapping[str, object]) -> bool:
        """Change the policy's settings by their names in ServerArgs; other names are left alone.

        False when a value is refused; nothing is changed then, and the log says why.
        """
        mine = {name: changes[field] for name, field in arguments.FIELDS.items() if field in changes}
        if not mine:
            return True
        try:
            self._policy.settings = self._policy.settings.replace(mine)
        except SettingsError as error:
            logger.warning("The gate refuses a change of its settings: %s", error)
            return False
        logger.info("The gate's settings are now %s", self._policy.settings.describe())
        return True

    def describe(self) -> dict[str, object]:
        """The block `spec_gate` of /server_info."""
        settings = self._policy.settings.describe()
        # The clock is read at a step boundary: with the step counters it tells what a step costs.
        described = self._state() | {"clock": time.monotonic(), "settings": settings}
        described |= {"identity": self._reporter.identity}
        return described | {"profile_key": self._key} if self._key is not None else described

    def _state(self) -> dict[str, object]:
        state = status.gate(self._policy, self._running)
        return state | self._switch.state() if self._switch is not None else state


def _unfinished(reqs: list[Req]) -> list[Req]:
    return [req for req in reqs if not req.finished()]
