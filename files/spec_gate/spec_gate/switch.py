"""Turns a scheduler between two modes: closed, it is that of a server without speculation; open, of a speculative one.

Nothing of SGLang's own loops, workers or kernels is replaced: `to` changes what the scheduler runs, the event loop that
is running then returns, and the scheduler enters the one that its new mode needs.

Between two steps, when no result is waiting, both modes describe a request alike: it has KV rows for all of its tokens
but the latest. So a switch changes the batch's own fields: `output_ids` against `spec_info`, and the flags.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch
from sglang.srt.managers.overlap_utils import FutureMap
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.utils.common import ceil_align

from spec_gate.draft_sync import DraftSync
from spec_gate.plain import PlainWorker

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.speculative.eagle_info import EagleDraftInput

logger = logging.getLogger(__name__)


class Switch:
    """What a scheduler needs in either mode, made once at start; `closed` is what it runs now.

    sync_interval: closed steps between two syncs of the draft; see DraftSync.
    """

    def __init__(self, scheduler: Scheduler, sync_interval: int) -> None:
        self.closed = False
        self._scheduler = scheduler
        # Since the gate opened, over all requests.
        self._accepted_tokens = 0
        self._verify_steps = 0
        worker = scheduler.draft_worker
        if scheduler.enable_overlap:  # EAGLEWorkerV2, which only holds what drafts
            self._draft_sync = DraftSync(worker.draft_worker, worker.draft_worker.draft_runner, sync_interval)
        else:
            self._draft_sync = DraftSync(worker, worker.model_runner, sync_interval)
            # What the overlap loop needs and init_overlap leaves out for EAGLEWorker.
            scheduler.batch_record_buf = [None] * 2
            scheduler.batch_record_ct = 0
        self._plain = PlainWorker(scheduler.tp_worker, self._draft_sync)
        none = SpeculativeAlgorithm.NONE
        plain_future_map = FutureMap(
            scheduler.max_running_requests,
            scheduler.chunked_prefill_size,
            scheduler.model_config.context_len,
            scheduler.device,
            none,
        )
        self._modes = {
            False: (scheduler.spec_algorithm, scheduler.enable_overlap, worker, scheduler.future_map),
            True: (none, True, self._plain, plain_future_map),
        }
        logger.info(
            "The gate's plain decode took %.1f s and %.3f GB, its draft sync (every %d steps) %.3f GB for %d slots",
            self._plain.start_seconds,
            self._plain.memory_bytes / (1 << 30),
            sync_interval,
            self._draft_sync.memory_bytes / (1 << 30),
            scheduler.req_to_token_pool.size,
        )

    def state(self) -> dict[str, object]:
        """Figures for /server_info and the status file: the draft sync's work so far, in tokens and seconds."""
        sync = self._draft_sync
        return {
            "pending_sync_steps": sync.pending_steps,
            "syncs": sync.syncs,
            "synced_tokens": sync.synced_tokens,
            "sync_seconds": round(sync.sync_seconds, 4),
            "accept_length_since_open": (
                round(self._accepted_tokens / self._verify_steps, 3) if self._verify_steps else None
            ),
        }

    def verified(self, requests: int, tokens: int) -> None:
        """Count a verify step of `requests` that accepted `tokens`, bonus tokens included."""
        self._accepted_tokens += tokens
        self._verify_steps += requests

    def to(self, closed: bool) -> None:
        """Switch to closed, or to open. Only between two steps; the event loop must be entered anew after it."""
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
        self._accepted_tokens = self._verify_steps = 0
        if not batch.is_empty():
            self._set_lengths(batch)
            draft_input = self._draft_sync.open(batch.get_model_worker_batch(), self._latest_tokens(batch))
            if s.enable_overlap:
                draft_input.future_indices = s.future_map.alloc_future_indices(len(batch.reqs))
                s.future_map.store_to_map_for_new_batch(draft_input.future_indices, draft_input)
            batch.spec_info = draft_input
            batch.output_ids = None
        for req in (*batch.reqs, *([s.chunked_req] if s.chunked_req else [])):
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
        batch.seq_lens = torch.tensor(
            lengths, dtype=torch.int64, device=batch.device
        )  # a copy: both are added to in place
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
