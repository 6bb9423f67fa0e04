"""Entry points of the plug-in: what is replaced in SGLang, and when.

SGLang's own hooks (``sglang.srt.plugins.hook_registry``) wrap functions that exist. Most of what is needed here does
not exist off GPUs or is a Triton kernel, and a hook that fails is only logged, so the names are bound directly.
"""

import importlib
import os
import sys
import time
from importlib.machinery import ModuleSpec
from importlib.metadata import version
from importlib.util import find_spec, module_from_spec

from sglang_cpu_engine import SUPPORTED_SGLANG, kvcacheio

FORWARD_COST = "SGLANG_CPU_ENGINE_FORWARD_MS"


def _asked_for() -> bool:
    return os.environ.get("SGLANG_USE_CPU_ENGINE") == "1"


def prepare_imports() -> None:
    """Let SGLang be imported without its CUDA package (group ``sglang.srt.platforms``).

    SGLang reaches this group first, in each of its processes, before it imports ``sgl_kernel``. Nothing is returned: no
    platform is offered, SGLang's own CPU device serves.
    """
    if not _asked_for():
        return
    # torch.compile would start a C++ compiler for functions of a few lines.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    if find_spec("sgl_kernel") is None:
        sys.modules["sgl_kernel"] = module_from_spec(ModuleSpec("sgl_kernel", None, is_package=True))
        sys.modules["sgl_kernel.kvcacheio"] = kvcacheio


def install() -> None:
    """Install the CPU engine into this process, if ``SGLANG_USE_CPU_ENGINE=1`` (group ``sglang.srt.plugins``).

    :raises SystemExit: when the engine was asked for and cannot be installed. SGLang would log an exception of a
        plug-in and start without it.
    """
    if not _asked_for():
        return
    try:
        found = version("sglang")
        if found not in SUPPORTED_SGLANG:
            raise RuntimeError(f"SGLang {found} is installed; install {' or '.join(SUPPORTED_SGLANG)}")
        cost = _forward_cost()
        prepare_imports()
        _replace_operations()
        if cost:
            _give_cost_shape(*cost)
    except Exception as error:
        raise SystemExit(f"sglang-cpu-engine: cannot run SGLang without a GPU: {error!r}") from error
    # SGLang sets up its log after its plug-ins.
    shape = "; a forward of the target takes max({} ms, {} ms a token)".format(*cost) if cost else ""
    print(f"sglang-cpu-engine: installed in process {os.getpid()}, SGLang {found}{shape}", file=sys.stderr, flush=True)


def _replace_operations() -> None:
    import torch
    import xgrammar
    from sglang.srt.constrained.xgrammar_backend import XGrammarGrammar
    from sglang.srt.distributed.device_communicators import pynccl
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.mem_cache import memory_pool
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.speculative.draft_utils import DraftBackendFactory

    from sglang_cpu_engine import attention, bookkeeping, tree

    # Called on every device: by models whose draft shares the embedding, and by the overlap loop.
    torch.cuda.synchronize = torch.cuda.empty_cache = lambda *_arguments, **_keywords: None
    torch.Tensor.record_stream = lambda _tensor, _stream: None

    ATTENTION_BACKENDS["torch_native"] = attention.TorchTreeAttention
    DraftBackendFactory.create_decode_backend = lambda factory: attention.TorchMultiStepDraft(
        factory.draft_model_runner, factory.topk, factory.speculative_num_steps
    )
    DraftBackendFactory.create_draft_extend_backend = lambda factory: attention.TorchTreeAttention(
        factory.draft_model_runner
    )
    handle_cpu_backends = ServerArgs._handle_cpu_backends

    def default_to_torch_native(server_args) -> None:
        # SGLang's default, intel_amx, falls back to torch_native too late to turn the CUDA graphs off.
        if server_args.device == "cpu" and server_args.attention_backend is None:
            server_args.attention_backend = "torch_native"
        handle_cpu_backends(server_args)

    ServerArgs._handle_cpu_backends = default_to_torch_native

    # torch brings NCCL along, and with two ranks SGLang would use it; without it the ranks speak through gloo.
    def no_nccl(_library_path=None):
        raise RuntimeError("NCCL needs a GPU")

    pynccl.NCCLLibrary = no_nccl

    # It would bind each rank's threads to a NUMA node of its own, by an operation that only sgl_kernel for AMX has.
    ModelRunner.init_threads_binding = lambda _runner: None

    memory_pool.MHATokenToKVPool._init_kv_copy_and_warmup = lambda _pool: None  # tries a Triton kernel out
    memory_pool.MHATokenToKVPool.move_kv_cache = lambda pool, target, source: memory_pool.move_kv_cache_native(
        pool.k_buffer, pool.v_buffer, target, source
    )

    # SGLang masks logits by its GPU kernels only; the library that made the masks can do it here.
    XGrammarGrammar.apply_vocab_mask = lambda _grammar, logits, vocab_mask: xgrammar.apply_token_bitmask_inplace(
        logits, vocab_mask
    )

    def verify_tree_greedy_func(  # noqa: PLR0917 (the signature is SGLang's)
        predicts, accept_index, accept_token_num, candidates, retrieve_index, retrieve_next_token,
        retrieve_next_sibling, target_predict, topk=-1,
    ):  # fmt: skip
        tree.verify_tree_greedy(
            predicts, accept_index, accept_token_num, candidates, retrieve_index, retrieve_next_token,
            retrieve_next_sibling, target_predict,
        )  # fmt: skip
        return predicts, accept_index, accept_token_num

    v1, v2 = "speculative.eagle_info", "speculative.eagle_info_v2"
    _bind("sgl_build_tree_kernel_efficient", tree.build_tree_kernel_efficient, "speculative.eagle_utils")
    _bind("verify_tree_greedy_func", verify_tree_greedy_func, "speculative.eagle_utils", v1, v2)
    # Without it SGLang verifies greedily whatever the temperature.
    _bind("TREE_SPEC_KERNEL_AVAILABLE", True, "speculative.spec_utils", v1)
    for operation in (
        tree.tree_speculative_sampling_target_only,
        tree.top_k_renorm_prob,
        tree.top_p_renorm_prob,
    ):
        _bind(operation.__name__, operation, v1, v2)
    _bind("assign_extend_cache_locs_func", bookkeeping.assign_extend_cache_locs_func, v2)
    for kernel, users in {
        bookkeeping.assign_req_to_token_pool: ["speculative.spec_utils"],
        bookkeeping.assign_draft_cache_locs: ["speculative.eagle_worker"],
        bookkeeping.create_extend_after_decode_spec_info: [v1],
        bookkeeping.align_evict_mask_to_page_size: [v1],
        bookkeeping.assign_draft_cache_locs_page_size_1: [v2],
        bookkeeping.fill_bonus_tokens: ["speculative.eagle_worker_v2"],
        bookkeeping.alloc_extend_kernel: ["mem_cache.allocator"],
        bookkeeping.alloc_decode_kernel: ["mem_cache.allocator"],
    }.items():
        _bind(kernel.__name__, _Kernel(kernel), *users)


def _bind(name: str, value, *modules: str) -> None:
    for module in modules:
        setattr(importlib.import_module(f"sglang.srt.{module}"), name, value)


class _Kernel:
    """A function that is called as a Triton kernel is: ``kernel[grid](...)``."""

    def __init__(self, function):
        self.function = function

    def __getitem__(self, _grid):
        return self.function


def _forward_cost() -> tuple[float, float] | None:
    text = os.environ.get(FORWARD_COST)
    if not text:
        return None
    try:
        floor, per_token = (float(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"{FORWARD_COST}={text!r}; give FLOOR,PER_TOKEN in milliseconds, such as 30,0.8") from None
    if not (0 <= floor < float("inf") and 0 <= per_token < float("inf")):
        raise ValueError(f"{FORWARD_COST}={text!r}; neither number may be negative or infinite")
    return floor, per_token


def _give_cost_shape(floor_ms: float, token_ms: float) -> None:
    """Let a target's forward take ``max(floor, tokens * token)``: bound by memory, then by compute, as on a GPU."""
    from sglang.srt.model_executor.model_runner import ModelRunner

    forward = ModelRunner.forward

    def timed_forward(runner, forward_batch, *arguments, **keywords):
        start = time.perf_counter()
        output = forward(runner, forward_batch, *arguments, **keywords)
        if not runner.is_draft_worker:
            cost = max(floor_ms, token_ms * forward_batch.input_ids.numel()) / 1000
            time.sleep(max(0.0, start + cost - time.perf_counter()))
        return output

    ModelRunner.forward = timed_forward
