"""Entry points of the plug-in: what SGLang's objects are replaced with, and when."""

import importlib
import logging
import os
import sys
from importlib.machinery import ModuleSpec
from importlib.metadata import version
from importlib.util import find_spec, module_from_spec

from sglang_cpu_engine import SUPPORTED_SGLANG, kvcacheio

logger = logging.getLogger(__name__)


def _asked_for() -> bool:
    return os.environ.get("SGLANG_USE_CPU_ENGINE") == "1"


def prepare_imports() -> None:
    """Let SGLang's modules be imported without its CUDA package; offers no platform (group ``sglang.srt.platforms``)."""
    if not _asked_for():
        return
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # compiling a handful of tiny functions costs more than they do
    if find_spec("sgl_kernel") is None:
        sys.modules["sgl_kernel"] = module_from_spec(ModuleSpec("sgl_kernel", None, is_package=True))
        sys.modules["sgl_kernel.kvcacheio"] = kvcacheio


def install() -> None:
    """Install the CPU engine into this process (group ``sglang.srt.plugins``).

    Nothing happens unless ``SGLANG_USE_CPU_ENGINE=1``.

    :raises SystemExit: when the engine was asked for and cannot be installed. SGLang only logs the exceptions of a
        plug-in and starts without it, so an exception would not do.
    """
    if not _asked_for():
        return
    try:
        if version("sglang") not in SUPPORTED_SGLANG:
            raise RuntimeError(f"SGLang is {version('sglang')}, supported: {', '.join(SUPPORTED_SGLANG)}")
        prepare_imports()
        _replace()
    except Exception as error:
        raise SystemExit(f"sglang-cpu-engine: cannot run SGLang on the CPU: {error!r}") from error
    logger.info("sglang-cpu-engine: installed, process %d", os.getpid())


def _bind(name: str, value, *modules: str) -> None:
    for module in modules:
        setattr(importlib.import_module("sglang.srt." + module), name, value)


class _Kernel:
    def __init__(self, function):
        self.function = function

    def __getitem__(self, _grid):
        return self.function


def _replace() -> None:
    import torch
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.speculative.draft_utils import DraftBackendFactory

    from sglang_cpu_engine import attention, bookkeeping, tree

    torch.cuda.synchronize = torch.cuda.empty_cache = lambda *_args, **_kwargs: None

    handle_cpu_backends = ServerArgs._handle_cpu_backends

    def choose_torch_native(server_args):
        # Its default is intel_amx, which falls back to torch_native too late to turn the CUDA graphs off.
        if server_args.device == "cpu" and server_args.attention_backend is None:
            server_args.attention_backend = "torch_native"
        handle_cpu_backends(server_args)

    ServerArgs._handle_cpu_backends = choose_torch_native

    # The pool moves KV rows by a Triton kernel, and tries it out when it is made; envs.SGLANG_NATIVE_MOVE_KV_CACHE has it
    # move them in torch, yet does not spare it the trial.
    MHATokenToKVPool._init_kv_copy_and_warmup = lambda _self: None

    ATTENTION_BACKENDS["torch_native"] = attention.TorchTreeAttention
    DraftBackendFactory.create_decode_backend = lambda self: attention.TorchMultiStepDraft(
        self.draft_model_runner, self.topk, self.speculative_num_steps
    )
    DraftBackendFactory.create_draft_extend_backend = lambda self: attention.TorchTreeAttention(self.draft_model_runner)

    _bind("sgl_build_tree_kernel_efficient", tree.build_tree_kernel_efficient, "speculative.eagle_utils")

    def verify_tree_greedy_func(
        predicts, accept_index, accept_token_num, candidates, retrieve_index, retrieve_next_token, retrieve_next_sibling,
        target_predict, topk=-1,
    ):  # fmt: skip
        tree.verify_tree_greedy(
            predicts, accept_index, accept_token_num, candidates, retrieve_index, retrieve_next_token,
            retrieve_next_sibling, target_predict,
        )  # fmt: skip
        return predicts, accept_index, accept_token_num

    _bind(
        "verify_tree_greedy_func", verify_tree_greedy_func,
        "speculative.eagle_utils", "speculative.eagle_info", "speculative.eagle_info_v2",
    )  # fmt: skip
    for function, users in (
        (bookkeeping.assign_req_to_token_pool, ["spec_utils"]),
        (bookkeeping.assign_draft_cache_locs, ["spec_utils", "eagle_worker"]),
        (bookkeeping.create_extend_after_decode_spec_info, ["spec_utils", "eagle_info"]),
    ):
        _bind(function.__name__, _Kernel(function), *("speculative." + user for user in users))
