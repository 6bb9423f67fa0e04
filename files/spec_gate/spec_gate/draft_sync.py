"""Keeps the draft model's memory whole while the gate is closed.

The draft's KV row at position p is computed from the target's hidden states at p and the token at p + 1. A closed step
produces both but runs no draft, so they are kept here, and the draft runs over what is pending in one forward every
`interval` closed steps, and when the gate opens. A prompt that arrives while the gate is closed is extended at once.
"""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING

import torch
from sglang.srt.layers.moe.utils import speculative_moe_a2a_backend_context, speculative_moe_backend_context
from sglang.srt.managers.schedule_batch import ModelWorkerBatch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.speculative.eagle_info import EagleDraftExtendInput, EagleDraftInput
from sglang.srt.speculative.spec_utils import fast_topk
from sglang.srt.utils import is_pin_memory_available

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.model_executor.model_runner import ModelRunner


class DraftSync:
    """The pending inputs of the draft and its latest outputs, one place per slot of the request pool.

    drafter: what drafts: EAGLEWorker (v1), or the EagleDraftWorker of EAGLEWorkerV2.
    runner: the draft's model runner.
    interval: closed steps between two syncs, and so the rows that a slot holds; 0 keeps nothing, and the gate opens
        with a draft that has not seen the tokens of the closed steps.

    `Req.draft_len` is the number of KV rows of the draft that are right while the gate is closed; None while it is
    open.
    """

    def __init__(self, drafter: object, runner: ModelRunner, interval: int) -> None:
        self.interval = interval
        self.pending_steps = 0  # closed steps since the last sync
        self.syncs = 0
        self.synced_tokens = 0
        self.sync_seconds = 0.0  # of the CPU, which launches the forward and does not wait for it
        self._runner = runner
        self._algorithm = drafter.speculative_algorithm
        self._topk = drafter.topk
        self._req_to_token = drafter.req_to_token_pool.req_to_token
        device = self._req_to_token.device
        slots = self._req_to_token.shape[0]
        width = EagleDraftExtendInput.hidden_size_for(drafter)
        self._hidden = torch.zeros(
            (slots, interval, width), dtype=EagleDraftExtendInput.dtype_for(drafter), device=device
        )
        self._tokens = torch.zeros((slots, interval), dtype=torch.int64, device=device)
        self._output_hidden = torch.zeros(
            (slots, EagleDraftInput.hidden_size_for(drafter)), dtype=EagleDraftInput.dtype_for(drafter), device=device
        )
        self._output_topk_p = torch.zeros((slots, self._topk), dtype=torch.float32, device=device)
        self._output_topk_index = torch.zeros((slots, self._topk), dtype=torch.int64, device=device)

    @property
    def memory_bytes(self) -> int:
        """Bytes of device memory that the buffers take."""
        buffers = (self._hidden, self._tokens, self._output_hidden, self._output_topk_p, self._output_topk_index)
        return sum(buffer.nbytes for buffer in buffers)

    def close(self, reqs: list[Req], slots: torch.Tensor, lengths: list[int], draft_input: EagleDraftInput) -> None:
        """Take over from speculation: `draft_input` holds the draft's outputs at the last row of each request.

        slots: request-pool slots, shape (requests,). lengths: KV rows of each request, all of them known to the draft.
        """
        self.pending_steps = 0
        self._output_hidden[slots] = draft_input.hidden_states
        self._output_topk_p[slots] = draft_input.topk_p
        self._output_topk_index[slots] = draft_input.topk_index
        for req, length in zip(reqs, lengths, strict=True):
            req.draft_len = length

    def open(self, batch: ModelWorkerBatch, bonus_tokens: torch.Tensor) -> EagleDraftInput:
        """Let the draft catch up; what it starts from: each request's latest token and the draft's outputs there."""
        if self.interval:
            self._catch_up(batch)
        slots = batch.req_pool_indices
        return EagleDraftInput(
            bonus_tokens=bonus_tokens.to(torch.int32),
            hidden_states=self._output_hidden[slots],
            topk_p=self._output_topk_p[slots],
            topk_index=self._output_topk_index[slots],
            capture_hidden_mode=CaptureHiddenMode.LAST,
            new_seq_lens=batch.seq_lens,
        )

    def keep_step(self, batch: ModelWorkerBatch, hidden: torch.Tensor, next_token_ids: torch.Tensor) -> None:
        """Keep a closed decode step: `hidden` (requests, hidden size) of its tokens, and the tokens that follow."""
        if not self.interval:
            return
        slots, rows = batch.req_pool_indices, (batch.seq_lens - 1) % self.interval
        self._hidden[slots, rows] = hidden
        self._tokens[slots, rows] = next_token_ids.to(torch.int64)
        self.pending_steps += 1
        if self.pending_steps == self.interval:
            self._catch_up(batch)

    def extend_prompt(
        self,
        batch: ModelWorkerBatch,
        hidden: torch.Tensor,
        next_token_ids: torch.Tensor,
        mm_input_embeds: torch.Tensor | None,
    ) -> None:
        """Extend the draft over a prefill batch: `hidden` (tokens, hidden size), `next_token_ids` (requests,)."""
        lengths = batch.extend_seq_lens
        input_ids = torch.roll(batch.input_ids, -1)
        input_ids[_device_tensor(lengths, input_ids.device).cumsum(0) - 1] = next_token_ids.to(input_ids.dtype)
        self._extend(dataclasses.replace(batch, input_ids=input_ids), hidden, mm_input_embeds)

    def _catch_up(self, batch: ModelWorkerBatch) -> None:
        """Run the draft over the pending rows of the requests in a decode batch, all in one forward."""
        started = time.perf_counter()
        self.pending_steps = 0
        ends = batch.seq_lens_cpu.tolist()
        behind = [i for i, req in enumerate(batch.reqs) if req.draft_len < ends[i]]
        if not behind:
            return
        reqs = [batch.reqs[i] for i in behind]
        ends = [ends[i] for i in behind]
        starts = [req.draft_len for req in reqs]
        lengths = [end - start for start, end in zip(starts, ends, strict=True)]
        assert max(lengths) <= self.interval, f"{max(lengths)} rows are pending, {self.interval} are kept"

        device = batch.req_pool_indices.device
        slots = batch.req_pool_indices[_device_tensor(behind, device)]
        seq_lens = _device_tensor(ends, device)
        slot_of_row = slots.repeat_interleave(_device_tensor(lengths, device), output_size=sum(lengths))
        position = _device_tensor([p for s, e in zip(starts, ends, strict=True) for p in range(s, e)], device)
        row = position % self.interval
        self._extend(
            dataclasses.replace(
                batch,
                forward_mode=ForwardMode.EXTEND,
                input_ids=self._tokens[slot_of_row, row],
                req_pool_indices=slots,
                seq_lens=seq_lens,
                orig_seq_lens=seq_lens.to(torch.int32),
                seq_lens_cpu=torch.tensor(ends, dtype=torch.int64),
                seq_lens_sum=sum(ends),
                out_cache_loc=self._req_to_token[slot_of_row, position].to(torch.int64),
                extend_num_tokens=sum(lengths),
                extend_seq_lens=lengths,
                extend_prefix_lens=starts,
                extend_logprob_start_lens=lengths,
                multimodal_inputs=[batch.multimodal_inputs[i] for i in behind] if batch.multimodal_inputs else None,
                lora_ids=[batch.lora_ids[i] for i in behind],
                reqs=reqs,
                input_embeds=None,
            ),
            self._hidden[slot_of_row, row],
            None,
        )
        self.syncs += 1
        self.synced_tokens += sum(lengths)
        self.sync_seconds += time.perf_counter() - started

    def _extend(self, batch: ModelWorkerBatch, hidden: torch.Tensor, mm_input_embeds: torch.Tensor | None) -> None:
        """One forward of the draft that writes the KV rows of the batch's tokens and keeps the outputs at their ends.

        batch: an extend batch whose input ids are already those of the following positions.
        """
        batch = dataclasses.replace(
            batch,
            return_logprob=False,
            spec_algorithm=self._algorithm,
            spec_info=EagleDraftInput(hidden_states=hidden, num_tokens_per_req=1, num_tokens_for_logprob_per_req=1),
            capture_hidden_mode=CaptureHiddenMode.LAST,
        )
        with speculative_moe_backend_context(), speculative_moe_a2a_backend_context():
            forward_batch = ForwardBatch.init_new(batch, self._runner)
            if mm_input_embeds is not None:
                forward_batch.mm_input_embeds = mm_input_embeds
            output = self._runner.forward(forward_batch).logits_output
        slots = batch.req_pool_indices
        probabilities = torch.softmax(output.next_token_logits, dim=-1)
        self._output_topk_p[slots], self._output_topk_index[slots] = fast_topk(probabilities, self._topk, dim=-1)
        self._output_hidden[slots] = output.hidden_states
        for req, length in zip(batch.reqs, batch.seq_lens_cpu.tolist(), strict=True):
            req.draft_len = length


def _device_tensor(values: list[int], device: torch.device) -> torch.Tensor:
    """An int64 tensor on `device`, copied without waiting for the work that is queued there."""
    pinned = torch.tensor(values, dtype=torch.int64, pin_memory=is_pin_memory_available(device))
    return pinned.to(device, non_blocking=True)
