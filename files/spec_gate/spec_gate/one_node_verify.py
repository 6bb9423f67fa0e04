"""A closed step as the verification of a tree with one node, for EAGLEWorker (spec v1).

The one node is the token that the previous step added last; nothing is drafted, and the target runs on exactly one
token per request. What follows in EAGLEWorker.verify and the draft's extend is unchanged, so nothing downstream can
tell. Attention backends and CUDA graphs are made for a fixed number of tokens per request, so the worker has two sets
of them and switching swaps the sets.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.moe.utils import speculative_moe_a2a_backend_context, speculative_moe_backend_context
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.speculative.adaptive_runtime_state import SpecRuntimeState
from sglang.srt.speculative.eagle_info import EagleVerifyInput


class OneNodeVerify:
    """Both runtime states of a worker. `worker` is an EAGLEWorker with its own state built already."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        target = worker.target_worker.model_runner
        self._open = SpecRuntimeState(
            speculative_num_steps=worker.speculative_num_steps,
            speculative_num_draft_tokens=worker.speculative_num_draft_tokens,
            draft_attn_backend=worker.draft_attn_backend,
            cuda_graph_runner=worker.cuda_graph_runner,
            target_attn_backend=target.attn_backend,
            target_graph_runner=target.graph_runner,
            draft_extend_attn_backend=worker.draft_extend_attn_backend,
            cuda_graph_runner_for_draft_extend=worker.cuda_graph_runner_for_draft_extend,
        )
        with (
            worker.draft_tp_context(worker.draft_model_runner.tp_group),
            speculative_moe_backend_context(),
            speculative_moe_a2a_backend_context(),
        ):
            self._closed = worker.build_adaptive_runtime_state(speculative_num_steps=0, speculative_num_draft_tokens=1)

    def switch(self, *, closed: bool) -> None:
        """Take the other set of backends and graphs for the steps that follow."""
        self._worker.apply_runtime_state(self._closed if closed else self._open)

    def draft(self, batch: Any) -> EagleVerifyInput:
        """The verify input of a decode step in the present state."""
        if self._worker.speculative_num_steps:
            return self._worker.draft(batch)
        return self._one_node(batch)

    def _one_node(self, batch: Any) -> EagleVerifyInput:
        # What EAGLEWorker's draft step does on the side, and a closed step must not leave out.
        batch.maybe_evict_swa()
        for request in batch.reqs:
            request.decode_batch_idx += 1
        last_tokens = batch.spec_info.bonus_tokens.to(torch.int64)
        penalties = batch.sampling_info.penalizer_orchestrator
        if penalties.is_required:
            penalties.cumulate_output_tokens(last_tokens)
        batch.return_hidden_states = False
        batch.seq_lens_sum = int(batch.seq_lens.sum())

        size, device = batch.batch_size(), batch.seq_lens.device
        no_node = torch.full((size, 1), -1, dtype=torch.long, device=device)
        return EagleVerifyInput(
            draft_token=last_tokens,
            custom_mask=torch.ones(batch.seq_lens_sum + size, dtype=torch.bool, device=device),
            positions=batch.seq_lens.to(torch.int64),
            retrieve_index=torch.arange(size, device=device).unsqueeze(1),
            retrieve_next_token=no_node,
            retrieve_next_sibling=no_node.clone(),
            retrieve_cum_len=None,
            spec_steps=0,
            topk=self._worker.topk,
            draft_token_num=1,
            capture_hidden_mode=CaptureHiddenMode.FULL,
            seq_lens_sum=batch.seq_lens_sum,
            seq_lens_cpu=batch.seq_lens_cpu,
        )
