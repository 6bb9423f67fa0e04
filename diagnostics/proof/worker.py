"""Which speculative worker SGLang takes, in which file it is, and what to say when the patch is in another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from diagnostics.proof.link import file_name, listed

WORKER_MODULES = {
    "EAGLEWorker": "sglang.srt.speculative.eagle_worker",
    "EAGLEWorkerV2": "sglang.srt.speculative.eagle_worker_v2",
    "MultiLayerEagleWorker": "sglang.srt.speculative.multi_layer_eagle_worker",
    "MultiLayerEagleWorkerV2": "sglang.srt.speculative.multi_layer_eagle_worker_v2",
    "StandaloneWorker": "sglang.srt.speculative.standalone_worker",
    "StandaloneWorkerV2": "sglang.srt.speculative.standalone_worker_v2",
    "NGRAMWorker": "sglang.srt.speculative.ngram_worker",
}
"""SGLang's speculative workers and their modules (SpeculativeAlgorithm.create_worker in speculative/spec_info.py)."""


ONLY_V2_SINCE = (0, 5, 13)
"""From this release on SGLang has only the V2 workers, with and without the overlap schedule."""


def selected_worker(arguments: Mapping[str, Any], version: str | None = None) -> tuple[str | None, str]:
    """The worker class that SGLang takes for these resolved arguments, and why.

    `version` is SGLang's, where it is known. The class is None when the arguments select none; raises KeyError when an
    argument that decides is missing.
    """
    algorithm = arguments["speculative_algorithm"]
    if algorithm is None:
        return None, "speculative_algorithm is None"
    if algorithm == "NGRAM":
        return "NGRAMWorker", "speculative_algorithm is NGRAM"
    if algorithm == "STANDALONE":
        family = "StandaloneWorker"
    elif algorithm in ("EAGLE", "EAGLE3", "NEXTN"):
        family = "MultiLayerEagleWorker" if arguments.get("enable_multi_layer_eagle") else "EAGLEWorker"
    else:
        return f"a worker for {algorithm}", f"speculative_algorithm is {algorithm}"
    if version is not None and release_of(version) >= ONLY_V2_SINCE:
        return family + "V2", f"SGLang {version} has no other"
    if not arguments["disable_overlap_schedule"]:
        return family + "V2", "disable_overlap_schedule=False"
    top_k = arguments.get("speculative_eagle_topk")
    if isinstance(top_k, int) and top_k > 1:
        return family, f"top-k {top_k} forces disable_overlap_schedule=True"
    return family, "disable_overlap_schedule=True"


def release_of(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: (0, 5, 12) for 0.5.12.post1."""
    numbers: list[int] = []
    for part in version.split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


def wrong_file(patched: Sequence[str], worker: str, module: str, because: str) -> str:
    """The sentence on a patch that is in other files than that of the worker that runs."""
    workers = [name for name in patched if name in WORKER_MODULES.values()] or list(patched)
    files = listed(map(file_name, workers)) or "no file of the worker's"
    version = "v2" if worker.endswith("V2") else "v1"
    other = "choose top-k above 1" if version == "v2" else "set top-k 1"
    return (
        f"the patch is in {files}, but these processes run {worker} from {file_name(module)}{because}. "
        f"Deploy with the {version} series or {other}."
    )
