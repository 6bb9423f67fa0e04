# ruff: noqa: E402 - SGLang reads the environment when it is imported
"""SGLang's real scheduler in this process, step by step: no HTTP, no tokenizer process; on the CPU engine, or on a GPU.

A test scripts what arrives before each step and sees every request's output when the scheduler has become idle, after
SGLang's own check that no KV slot and no request slot was lost.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

# The CPU engine, unless this is to run on a GPU, with CUDA graphs.
DEVICE = os.environ.get("SPECGATE_DEVICE", "cpu")
if DEVICE == "cpu":
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
else:
    os.environ["TRITON_F32_DEFAULT"] = "ieee"  # else the attention kernels multiply in TF32
os.environ.setdefault("SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE", "1")

import torch
from sglang.srt.distributed import parallel_state
from sglang.srt.layers.activation import SiluAndMul
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.rotary_embedding import RotaryEmbedding
from sglang.srt.managers.io_struct import AbortReq, TokenizedGenerateReqInput
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.plugins import load_plugins
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import PortArgs, ServerArgs, set_global_server_args_for_scheduler
from spec_gate import profile
from spec_gate.server_key import server_key

COMMON = {
    "dtype": "float32",
    "sampling_backend": "pytorch",
    "grammar_backend": "xgrammar",
    "skip_server_warmup": True,
    "max_total_tokens": 8192,
    "max_running_requests": 16,
    "chunked_prefill_size": 2048,
    "random_seed": 1,
    "log_level": "warning",
}
# On a GPU: triton's attention knows float32; the others need the model of wide_heads.py.
ATTENTION = os.environ.get("SPECGATE_ATTENTION", "triton")
DTYPES = {"triton": "float32", "flashinfer": "float16", "fa3": "bfloat16"}
DEVICES = {
    "cpu": {
        "attention_backend": "torch_native",
        "disable_cuda_graph": True,
        "mem_fraction_static": 0.1,
    },
    "cuda": {
        "attention_backend": ATTENTION,
        "dtype": DTYPES[ATTENTION],
        "cuda_graph_max_bs": 16,
        "disable_piecewise_cuda_graph": True,
        "skip_tokenizer_init": True,
        "mem_fraction_static": 0.95,
    },
}
TREE = {
    "speculative_algorithm": "EAGLE3",
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 4,
    "speculative_num_draft_tokens": 8,
}
CHAIN = TREE | {"speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4}


def write_profile(
    folder: Path, target: str, draft: str, worker: Mapping[str, object], break_evens: Mapping[int, float], **key: object
) -> Path:
    """A profile for a scheduler of TREE or CHAIN: by batch the break-even at all contexts; `key` replaces fields."""
    places = {"tp_size": 1, "nnodes": 1, "base_gpu_id": 0, "gpu_id_step": 1}
    models = {"model_path": target, "speculative_draft_model_path": draft}
    document = profile.make(
        made="2026-01-02T03:04:05Z",
        key=server_key(SimpleNamespace(device=DEVICE, **places, **models, **worker)) | key,
        cells=[profile.Cell(batch, 64, 0.01 * break_even, 0.01) for batch, break_even in break_evens.items()],
        acceptance_seen=None,
        recommended=dict.fromkeys(profile.RECOMMENDED_FIELDS),
        why="given by a test",
    )
    path = folder / f"{document['id']}.json"
    path.write_text(json.dumps(document))
    return path


class _Idle(Exception):
    """The way out of an endless loop."""


@dataclasses.dataclass
class Request:
    """What a test asks for; `at` is the step before which it arrives, `abort_at` the one before which it is aborted."""

    input_ids: list[int]
    max_new_tokens: int = 32
    at: int = 0
    abort_at: int | None = None
    sampling: Mapping[str, object] = dataclasses.field(default_factory=dict)
    return_logprob: bool = False
    stream: bool = False


@dataclasses.dataclass
class Output:
    """What the scheduler has sent for a request: tokens, the reason it ended, and the output log-probabilities."""

    token_ids: list[int] = dataclasses.field(default_factory=list)
    finished: object = None
    logprobs: list[float] = dataclasses.field(default_factory=list)
    verify_steps: int = 0
    correct_drafts: int = 0

    @property
    def accept_length(self) -> float:
        """Tokens per verify step."""
        return 1 + self.correct_drafts / self.verify_steps


class InProcessScheduler(Scheduler):
    """A scheduler whose requests come from `serve`. One at a time: SGLang's process groups are global."""

    def __init__(self, target: str, draft: str | None = None, **arguments: object) -> None:
        load_plugins()
        models = {"model_path": target} | ({"speculative_draft_model_path": draft} if draft else {})
        args = ServerArgs(**(COMMON | {"device": DEVICE} | DEVICES[DEVICE] | models | arguments))
        set_global_server_args_for_scheduler(args)
        super().__init__(args, PortArgs.init_new(args), 0, 0, 0, 0, 0, 0, None)
        self.send_to_tokenizer = self.send_to_detokenizer = self
        self.before_step: Callable[[int], None] = lambda _step: None
        self._step = 0
        self._script: list[tuple[str, Request]] = []
        self._outputs: dict[str, Output] = {}
        self._served = 0

    def serve(self, requests: Sequence[Request]) -> list[Output]:
        """Run the event loop until all `requests` are done and the scheduler is idle; the outputs in their order.

        `before_step` is called with the number of the step, 0 first, before each.
        """
        self._step = 0
        names = [f"request-{self._served + i}-" for i in range(len(requests))]
        self._served += len(requests)
        self._script = list(zip(names, requests, strict=True))
        self._outputs = {name: Output() for name in names}
        try:
            self.run_event_loop()
        except _Idle:
            return [self._outputs[name] for name in names]
        raise AssertionError("the event loop ended")

    @property
    def gate_closed(self) -> bool:
        """Whether the scheduler runs plain decode."""
        switch = self.spec_gate._switch
        return switch is not None and switch.closed

    def free_slots(self) -> tuple[int, int]:
        """Free KV slots, those of the prefix cache included, and free request slots."""
        return (
            self.token_to_kv_pool_allocator.available_size() + self.tree_cache.evictable_size(),
            self.req_to_token_pool.available_size(),
        )

    def close(self) -> None:
        """Give up SGLang's process groups, so that another scheduler can be made."""
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()

    def recv_requests(self) -> list[object]:
        """What arrives before this step."""
        self.before_step(self._step)
        now = self._step
        self._step += 1
        arrived = [
            _tokenized(name, r, self.tokenizer, self.model_config.vocab_size) for name, r in self._script if r.at == now
        ]
        return arrived + [AbortReq(rid=name) for name, r in self._script if r.abort_at == now]

    def on_idle(self) -> None:
        """SGLang's own checks, then out, once nothing is to come."""
        super().on_idle()
        last = max((max(r.at, r.abort_at or 0) for _, r in self._script), default=0)
        if self._step > last and self.is_fully_idle():
            raise _Idle

    def send_output(self, output: object, recv_obj: object = None) -> None:
        """Collect what would go to the detokenizer."""
        if isinstance(output, AbortReq):
            self._outputs[output.rid].finished = output.finished_reason or {"type": "abort"}
            return
        for i, rid in enumerate(getattr(output, "rids", None) or []):
            one = self._outputs[rid]
            one.token_ids += list(output.output_ids[i])
            one.finished = output.finished_reasons[i]
            if output.output_token_logprobs_val:
                one.logprobs += list(output.output_token_logprobs_val[i])
            if output.spec_verify_ct:
                one.verify_steps = output.spec_verify_ct[i]
                one.correct_drafts = output.spec_num_correct_drafts[i]


def _tokenized(name: str, request: Request, tokenizer: object, vocabulary: int) -> TokenizedGenerateReqInput:
    params = SamplingParams(
        **({"temperature": 0.0, "ignore_eos": True, "max_new_tokens": request.max_new_tokens} | dict(request.sampling))
    )
    params.normalize(tokenizer)
    params.verify(vocabulary)
    return TokenizedGenerateReqInput(
        rid=name,
        input_text="",
        input_ids=list(request.input_ids),
        mm_inputs=None,
        sampling_params=params,
        return_logprob=request.return_logprob,
        logprob_start_len=-1,
        top_logprobs_num=0,
        token_ids_logprob=None,
        stream=request.stream,
    )


if DEVICE == "cpu":
    torch.set_num_threads(1)
elif DTYPES[ATTENTION] == "float32":  # which the fused kernels do not know
    for layer in (RMSNorm, SiluAndMul, RotaryEmbedding):
        layer.forward_cuda = layer.forward_native
