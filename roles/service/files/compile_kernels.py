"""Compiles what FlashInfer would compile at the server's start and, worse, at its first sampled request (minutes).

Run before the switch, with the environment that the unit gives the server, while the former one goes on serving: nvcc
needs no GPU, and none is shown to PyTorch here. What is compiled already is left as it is.

Only modules that follow from the server's arguments: those that also depend on the model's shapes are compiled by the
server itself before it is ready, as are Triton's and others' kernels, which are made for the values they get.

Exit status: 0 when all is there or FlashInfer is not installed, 1 with the reason when something cannot be compiled.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from typing import Any

ATTENTION = ("attention-backend", "prefill-attention-backend", "decode-attention-backend")
# Of what ninja printed; its lines with the compiler's arguments are thousands of characters long.
REASON_LINES, REASON_WIDTH = 20, 300


def capabilities() -> list[str]:
    """Compute capability of each kind of card, such as ``["10.0"]``; asking for it takes no GPU memory."""
    query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True).stdout
    return sorted(set(answer.split()))


def modules(arguments: Mapping[str, Any], cards: Iterable[str]) -> list[tuple[str, str]]:
    """The modules of ``flashinfer.jit``, each with the function that describes it, of a server with ``arguments``.

    ``arguments`` are those of ``sglang.launch_server`` without dashes, ``cards`` as ``capabilities`` tells them.
    """
    majors = {card.partition(".")[0] for card in cards}
    # Whatever sampling-backend says: the verification of drafts renormalises with it (sgl_kernel/sampling.py).
    found = [("sampling", "gen_sampling_module")]
    backends = {arguments.get(name) for name in (*ATTENTION, "speculative-draft-attention-backend")}
    if "10" in majors and backends & {"trtllm_mla", "trtllm_mha"}:
        found.append(("attention", "gen_trtllm_gen_fmha_module"))
    # SGLang asks for FlashInfer's way named trtllm (flashinfer_comm_fusion.py).
    if majors & {"9", "10"} and arguments.get("enable-flashinfer-allreduce-fusion"):
        found.append(("comm", "gen_trtllm_comm_module"))
    return found


def main(arguments: Mapping[str, Any]) -> None:
    if importlib.util.find_spec("flashinfer") is None:
        print("FlashInfer is not installed: nothing to compile")
        return
    name = "FlashInfer"
    try:
        cards = capabilities()
        # Read when FlashInfer is imported, in place of the cards that PyTorch sees; it is in the folder's name as well.
        os.environ.setdefault("FLASHINFER_CUDA_ARCH_LIST", " ".join(cards))
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        for module, name in modules(arguments, cards):
            spec = getattr(importlib.import_module(f"flashinfer.jit.{module}"), name)()
            if not spec.is_aot:
                spec.build(verbose=False)
            print(f"{spec.name}: {spec.get_library_path()}", flush=True)
    # Whatever it is, it would end the server's start or its first request.
    except Exception as error:
        lines = [line[:REASON_WIDTH] for line in str(error).splitlines()[-REASON_LINES:]]
        sys.exit("\n".join([f"{name}: {type(error).__name__}:", *lines]))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
