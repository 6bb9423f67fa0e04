"""The target model's ordinary decode, beside the verification that speculation runs on it."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from sglang.srt.model_executor.cuda_graph_runner import CudaGraphRunner
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.utils import get_available_gpu_memory

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ModelWorkerBatch
    from sglang.srt.managers.tp_worker import TpModelWorker
    from sglang.srt.managers.utils import GenerationBatchResult
    from sglang.srt.server_args import ServerArgs

    from spec_gate.draft_sync import DraftSync

logger = logging.getLogger(__name__)

# What sizes the attention backend for a tree or a chain of draft tokens.
_SIZES = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")


class PlainWorker:
    """Stands in for the speculative worker while the gate is closed.

    It runs the target as a server without speculation does: with an attention backend and decode graphs that are made
    for one token a request, and its sampler. What the draft needs of each forward goes to `draft_sync`.
    """

    def __init__(self, target: TpModelWorker, draft_sync: DraftSync) -> None:
        self._target = target
        self._draft_sync = draft_sync
        started = time.perf_counter()
        runner, args = target.model_runner, target.server_args
        before = get_available_gpu_memory(runner.device, runner.gpu_id)
        speculative = (runner.attn_backend, runner.graph_runner, runner.spec_algorithm)
        workspace = runner.init_new_workspace
        runner.spec_algorithm = SpeculativeAlgorithm.NONE
        try:
            with _without_speculation(args):
                backend = runner._get_attention_backend(init_new_workspace=True)
                graphs = None if args.disable_cuda_graph else CudaGraphRunner(runner, attn_backend=backend)
        finally:
            runner.init_new_workspace = workspace
            runner.spec_algorithm = speculative[2]
        self._states = {False: speculative, True: (backend, graphs, SpeculativeAlgorithm.NONE)}
        self.start_seconds = time.perf_counter() - started
        self.memory_bytes = int((before - get_available_gpu_memory(runner.device, runner.gpu_id)) * (1 << 30))

    def activate(self, closed: bool) -> None:
        """Make the target ready for plain batches, or for the speculative worker's again."""
        runner = self._target.model_runner
        runner.attn_backend, runner.graph_runner, runner.spec_algorithm = self._states[closed]
        # With both as in a server without speculation, the target leaves sampling under a grammar to the overlap loop.
        self._target.enable_spec = not closed
        self._target.enable_overlap = closed or not self._target.server_args.disable_overlap_schedule

    def forward_batch_generation(self, batch: ModelWorkerBatch) -> GenerationBatchResult:
        """Run a prefill or decode batch on the target and sample; the result is that of `TpModelWorker`."""
        batch.capture_hidden_mode = CaptureHiddenMode.FULL
        result = self._target.forward_batch_generation(batch)
        if result.delay_sample_func is None:
            self._keep(batch, result)
            return result
        sample = result.delay_sample_func

        def sample_and_keep() -> GenerationBatchResult:
            sampled = sample()
            self._keep(batch, sampled)
            return sampled

        result.delay_sample_func = sample_and_keep
        return result

    def _keep(self, batch: ModelWorkerBatch, result: GenerationBatchResult) -> None:
        output = result.logits_output
        if batch.forward_mode.is_extend():
            self._draft_sync.extend_prompt(batch, output.hidden_states, result.next_token_ids, output.mm_input_embeds)
        else:
            self._draft_sync.keep_step(batch, output.hidden_states, result.next_token_ids)
        # The result waits in the overlap queue: it must not hold a prompt's hidden states meanwhile.
        output.hidden_states = None


@contextlib.contextmanager
def _without_speculation(args: ServerArgs) -> Iterator[None]:
    """Arguments as of a server that does not speculate and whose decode graphs give hidden states."""
    # The algorithm's name stays: the layers of an EAGLE-3 target were built for it.
    changed = dict.fromkeys(_SIZES) | {"enable_return_hidden_states": True}
    saved = {name: getattr(args, name) for name in changed}
    for name, value in changed.items():
        setattr(args, name, value)
    try:
        yield
    finally:
        for name, value in saved.items():
            setattr(args, name, value)
