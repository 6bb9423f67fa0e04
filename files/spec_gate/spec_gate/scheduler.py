"""The gate in SGLang's scheduler: closed, it is one of a server without speculation; open, one of a speculative server.

The patched event loops ask `at_boundary` before they schedule, and leave when the mode has changed; `run` then enters the
loop of the new mode. Nothing of SGLang's own loops, workers or kernels is replaced.

At a boundary, when no result is waiting, the two modes describe a request alike: KV rows for all of its tokens but the
latest. So a switch only turns the batch's own fields: `output_ids` against `spec_info`, and the flags.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from sglang.srt.managers.overlap_utils import FutureMap
from sglang.srt.mem_cache.common import ceil_align
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from spec_gate import status
from spec_gate.draft_sync import DraftSync
from spec_gate.plain import PlainWorker
from spec_gate.policy import Policy, Settings, SettingsError

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.speculative.eagle_info import EagleDraftInput

logger = logging.getLogger(__name__)

_SETTINGS = tuple(field.name for field in dataclasses.fields(Settings))


class SchedulerGate:
    """Holds the mode of one scheduler. `closed` is what the scheduler runs; the policy's mode is what it shall run.

    The two differ in one case: an idle server whose policy has opened keeps its closed loop until a decode batch is there.
    Prompts are prefilled no slower there, and a burst that closes the gate again has then cost no switch.
    """

    def __init__(self, scheduler: Scheduler, settings: Settings, sync_interval: int) -> None:
        self.policy = Policy(settings)
        self.closed = False
        worker = scheduler.draft_worker
        self._scheduler = scheduler
        self._drafter = worker.draft_worker if scheduler.enable_overlap else worker
        draft_runner = self._drafter.draft_runner if scheduler.enable_overlap else worker.model_runner
        self._draft_sync = DraftSync(self._drafter, draft_runner, sync_interval)
        self._plain = PlainWorker(scheduler.tp_worker, self._draft_sync)
        none = SpeculativeAlgorithm.NONE
        plain_map = FutureMap(
            scheduler.max_running_requests,
            scheduler.chunked_prefill_size,
            scheduler.model_config.context_len,
            scheduler.device,
            none,
        )
        if not scheduler.enable_overlap:  # what init_overlap leaves out for EAGLEWorker, which never overlaps
            scheduler.batch_record_buf = [None] * 2
            scheduler.batch_record_ct = 0
        self._modes = {
            False: (scheduler.spec_algorithm, scheduler.enable_overlap, worker, scheduler.future_map),
            True: (none, True, self._plain, plain_map),
        }
        logger.info(
            "spec_gate armed: decode graphs %.2f s, %.3f GB; draft sync every %d steps, buffers %.3f GB",
            self._plain.start_seconds,
            self._plain.memory_bytes / (1 << 30),
            sync_interval,
            self._draft_sync.memory_bytes / (1 << 30),
        )

    def run(self) -> None:
        """The scheduler's event loop: SGLang's overlap loop or its normal one, whichever the mode needs."""
        while True:
            if self._scheduler.enable_overlap:
                self._scheduler.event_loop_overlap()
            else:
                self._scheduler.event_loop_normal()

    def state(self) -> dict[str, object]:
        """The gate's block in /server_info."""
        return status.gate(self.policy, len(self._scheduler.running_batch.reqs))

    @property
    def setting_names(self) -> set[str]:
        """The names under which /set_internal_state takes the policy's settings."""
        return {f"spec_gate_{name}" for name in _SETTINGS}

    def change_settings(self, changes: Mapping[str, object]) -> bool:
        """Change the policy's settings by their names in /set_internal_state; other names are left alone.

        False when a value is refused; nothing is changed then, and the log says why.
        """
        mine = {name.removeprefix("spec_gate_"): changes[name] for name in self.setting_names & changes.keys()}
        try:
            self.policy.settings = self.policy.settings.replace(mine)
        except SettingsError as error:
            logger.warning("spec_gate refused a change of its settings: %s", error)
            return False
        if mine:
            logger.info("spec_gate settings changed: %s", self.policy.settings)
        return True

    def at_boundary(self) -> bool:
        """Decide and switch, between receiving requests and scheduling. True when the event loop must be left."""
        s = self._scheduler
        last = s.last_batch
        prefilled = last is not None and last.forward_mode.is_extend()
        if prefilled and (s.waiting_queue or s.chunked_req is not None or last.chunked_req is not None):
            return False  # more prefill follows, and no decode step is to be decided yet
        reqs = [req for req in s.running_batch.reqs if not req.finished()]
        if prefilled:
            reqs += [req for req in last.reqs if not req.finished()]
        kv_tokens = sum(req.seqlen for req in reqs) if self.policy.settings.kv_token_threshold else 0
        closed = self.policy.decide(len(reqs), kv_tokens).mode == "closed"
        if not reqs or closed == self.closed:
            return False
        self._switch(closed)
        return True

    def _switch(self, closed: bool) -> None:
        s = self._scheduler
        if s.enable_overlap:
            while s.result_queue:
                s.process_batch_result(*s.result_queue.popleft())
        batch = self._merged_batch()
        if closed:
            self._close(batch)
        self.closed = closed
        s.spec_algorithm, s.enable_overlap, s.model_worker, s.future_map = self._modes[closed]
        batch.spec_algorithm, batch.enable_overlap = s.spec_algorithm, s.enable_overlap
        self._plain.activate(closed)
        if not closed:
            self._open(batch)
        s.last_batch = None

    def _merged_batch(self) -> ScheduleBatch:
        """The running batch with the last prefill merged into it and without finished requests."""
        s = self._scheduler
        last = s.last_batch
        if last is not None and last.forward_mode.is_extend():
            last.filter_batch()
            if s.running_batch.is_empty():
                s.running_batch = last
            elif not last.is_empty():
                s.running_batch.merge_batch(last)
        batch = s.running_batch
        # EAGLEWorker has already taken finished requests out of its spec_info.
        batch.filter_batch(v1_spec_info_filtered=True)
        batch.batch_is_full = False
        return batch

    def _close(self, batch: ScheduleBatch) -> None:
        if batch.is_empty():
            return
        lengths = self._set_lengths(batch)
        self._draft_sync.close(batch.reqs, batch.req_pool_indices, lengths, self._draft_input(batch))
        for req in batch.reqs:
            self._release_reserved(req)
        batch.spec_info = None
        batch.output_ids = self._latest_tokens(batch)

    def _open(self, batch: ScheduleBatch) -> None:
        s = self._scheduler
        if not batch.is_empty():
            self._set_lengths(batch)
            draft_input = self._draft_sync.open(batch.get_model_worker_batch(), self._latest_tokens(batch))
            if s.enable_overlap:
                draft_input.future_indices = s.future_map.alloc_future_indices(len(batch.reqs))
                s.future_map.store_to_map_for_new_batch(draft_input.future_indices, draft_input)
            batch.spec_info = draft_input
            batch.output_ids = None
        # Retracted requests wait, too, and are prefilled with the draft again.
        for req in (*batch.reqs, *s.waiting_queue, *([s.chunked_req] if s.chunked_req else [])):
            req.draft_len = None

    def _draft_input(self, batch: ScheduleBatch) -> EagleDraftInput:
        """The draft's latest outputs; in the overlap loop the batch only knows where the future map keeps them."""
        if self._scheduler.enable_overlap:
            future = self._scheduler.future_map
            indices = batch.spec_info.future_indices.indices
            batch.spec_info.topk_p = future.topk_p_buf[indices]
            batch.spec_info.topk_index = future.topk_index_buf[indices]
            batch.spec_info.hidden_states = future.hidden_states_buf[indices]
        return batch.spec_info

    def _set_lengths(self, batch: ScheduleBatch) -> list[int]:
        """Set the batch's sequence lengths from its requests: KV rows, so all tokens but the latest."""
        lengths = [req.seqlen - 1 for req in batch.reqs]
        batch.seq_lens_cpu = torch.tensor(lengths, dtype=torch.int64)
        batch.seq_lens = torch.tensor(lengths, dtype=torch.int64, device=batch.device)  # a copy: both are added to in place
        batch.orig_seq_lens = batch.seq_lens.to(torch.int32)
        batch.seq_lens_sum = sum(lengths)
        return lengths

    def _latest_tokens(self, batch: ScheduleBatch) -> torch.Tensor:
        return torch.tensor([req.output_ids[-1] for req in batch.reqs], dtype=torch.int64, device=batch.device)

    def _release_reserved(self, req: Req) -> None:
        """Give back the KV slots that EAGLEWorkerV2 has reserved beyond the request's tokens."""
        s = self._scheduler
        start = ceil_align(req.kv_committed_len, s.page_size)
        if start < req.kv_allocated_len:
            s.token_to_kv_pool_allocator.free(
                s.req_to_token_pool.req_to_token[req.req_pool_idx, start : req.kv_allocated_len]
            )
        req.kv_allocated_len = req.kv_committed_len


def arm(scheduler: Scheduler) -> SchedulerGate | None:
    """The gate for this scheduler, or None when its arguments set no threshold: it then runs as released."""
    args = scheduler.server_args
    settings = Settings(**{name: getattr(args, f"spec_gate_{name}") for name in _SETTINGS})
    if not settings.threshold:
        return None
    return SchedulerGate(scheduler, settings, args.spec_gate_sync_interval)
