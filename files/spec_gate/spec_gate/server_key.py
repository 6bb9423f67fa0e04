"""What a profile is bound to: the host, its devices and driver, the versions, the models and the speculative shape."""

from __future__ import annotations

import importlib.metadata
import os
import socket
from typing import Any

from spec_gate import loaded


def server_key(server_args: Any) -> dict[str, Any]:
    """The key of this server, with the fields `profile.KEY_FIELDS`; `server_args` as SGLang has completed them.

    devices: the name of each rank's device; the CPU engine's with the cost shape that it simulates. driver: that of
    NVIDIA's devices, else None.
    """
    devices, driver = [_cpu()] * server_args.tp_size, None
    if server_args.device == "cuda":
        devices, driver = _cuda_devices(server_args), _nvidia_driver()
    return {
        "host": socket.gethostname(),
        "devices": devices,
        "driver": driver,
        "sglang_version": importlib.metadata.version("sglang"),
        "series": ",".join(sorted({module.series for module in loaded.registered()})),
        "model": server_args.model_path,
        "draft": server_args.speculative_draft_model_path,
        "tp_size": server_args.tp_size,
        "speculative": {
            "num_steps": server_args.speculative_num_steps,
            "eagle_topk": server_args.speculative_eagle_topk,
            "num_draft_tokens": server_args.speculative_num_draft_tokens,
        },
    }


def _cpu() -> str:
    # Not a device's property but an option of the CPU engine: with it a step costs what another machine's would.
    shape = os.environ.get("SGLANG_CPU_ENGINE_FORWARD_MS")
    return f"cpu, SGLANG_CPU_ENGINE_FORWARD_MS={shape}" if shape else "cpu"


def _cuda_devices(server_args: Any) -> list[str]:
    import torch

    # As SGLang places its ranks; of several nodes each one has its own.
    here = server_args.tp_size // server_args.nnodes
    places = [server_args.base_gpu_id + rank * server_args.gpu_id_step for rank in range(here)]
    return [torch.cuda.get_device_name(place) for place in places]


def _nvidia_driver() -> str | None:
    import torch

    if torch.version.cuda is None:
        return None
    import pynvml

    pynvml.nvmlInit()
    try:
        version = pynvml.nvmlSystemGetDriverVersion()
    finally:
        pynvml.nvmlShutdown()
    return version.decode() if isinstance(version, bytes) else version
