"""Do the models fit: the server's arguments, the target, and the draft to the target?

By the files themselves: config.json, the index of the weights, and the shapes in the headers of the safetensors.
How SGLang 0.5.12.post1 reads them: ``models/llama_eagle3.py``, ``models/kimi_k25_eagle3.py``, ``llama_eagle.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from diagnostics.doctor import check
from diagnostics.doctor.check import Check

Facts = Mapping[str, Any]
Arguments = Mapping[str, Any]

DRAFTED = ("EAGLE", "EAGLE3")
"""Algorithms with a draft model of its own kind that can be told from its files."""

DRAFT_NAMES = ("draft_path", "draft_algorithm", "draft_width", "draft_vocabulary", "draft_tokenizer")
NAMES = ("target_path", "target_architecture", "tokenizer", "tensor_parallel", "weights_fit", *DRAFT_NAMES)


def judge(
    models: Mapping[str, Facts | None],
    arguments: Arguments,
    read_source: Callable[[str], Facts | None],
    gpu_memory_mb: int | None,
) -> Iterator[Check]:
    """Judge target and draft.

    `models`: what the collector read on the host, by path. `read_source`: reads the folder of the controller that this
    deploy would copy to a path, None where there is none. `gpu_memory_mb`: of the smallest card, None without one.
    """
    path = arguments.get("model-path")
    if not path:
        yield check.unknown("target_path", "service_server_arguments names no model-path", "Name the target's folder.")
        return
    target = models.get(str(path)) or read_source(str(path))
    yield _path("target_path", str(path), target)
    algorithm = str(arguments.get("speculative-algorithm") or "").upper()
    draft_path = str(arguments.get("speculative-draft-model-path") or "")
    draft = (models.get(draft_path) or read_source(draft_path)) if draft_path else None
    if target is not None and target["error"] is None:
        yield _architecture(target, arguments)
        yield _tokenizer(target, arguments)
        yield _tensor_parallel(target, arguments)
        yield _weights_fit(target, draft, arguments, gpu_memory_mb)
    if algorithm not in DRAFTED:
        why = f"speculative-algorithm is {algorithm}" if algorithm else "no speculation is configured"
        yield from (check.not_applicable(name, why) for name in DRAFT_NAMES)
        return
    if not draft_path:
        yield Check("draft_path", check.FAIL, f"{algorithm} without a speculative-draft-model-path", "Name the draft.")
        return
    yield _path("draft_path", draft_path, draft)
    if draft is not None and draft["error"] is None:
        yield _algorithm(draft, algorithm)
        if target is not None and target["error"] is None:
            yield _width(draft, target, algorithm)
            yield _vocabulary(draft, target)
            yield _same_tokenizer(draft, target)


def _path(name: str, path: str, model: Facts | None) -> Check:
    if not path.startswith("/"):
        return Check(
            name,
            check.WARN,
            f"{path} is not a path, so the server would fetch it from a hub at its start",
            "Bring the model to the host and name its folder.",
        )
    if model is None:
        return Check(
            name,
            check.FAIL,
            f"there is no folder {path}",
            "Correct the path, bring the model to the host, or name it in model_sources.",
        )
    if model["error"]:
        return Check(name, check.FAIL, f"{path}: {model['error']}", "It is no model's folder, or its copy is damaged.")
    if model["missing_weights"] or not model["weight_files"]:
        absent = model["missing_weights"] or ["no file with weights"]
        shown = ", ".join(absent[:3]) + (f" and {len(absent) - 3} more" if len(absent) > 3 else "")
        return Check(name, check.FAIL, f"{path} lacks {shown}", "Complete the copy of the model.")
    return check.passed(name, f"{path}, {model['weight_bytes'] / 2**30:.1f} GiB of weights")


def _architectures(model: Facts) -> list[str]:
    return list(model["config"].get("architectures") or [])


def _architecture(target: Facts, arguments: Arguments) -> Check:
    name = "target_architecture"
    found = ", ".join(_architectures(target))
    if not found:
        return Check(name, check.FAIL, "config.json names no architecture", "SGLang chooses the model's code by it.")
    if "Eagle" in found:
        return Check(name, check.FAIL, f"{found} is a draft", "Name the target in model-path, the draft apart from it.")
    own_code = bool(target["config"].get("auto_map"))
    return check.judged(
        name,
        not own_code or bool(arguments.get("trust-remote-code")),
        found,
        "The model brings code of its own; set trust-remote-code once you have read it.",
    )


def _vocabularies(model: Facts) -> list[str]:
    """The files of the tokenizer that have its tokens, the one that tells most first."""
    return [file for file in model["tokenizer"] if file != "tokenizer_config.json"]


def _tokenizer(target: Facts, arguments: Arguments) -> Check:
    name = "tokenizer"
    if arguments.get("skip-tokenizer-init"):
        return check.not_applicable(name, "skip-tokenizer-init is set: clients send token ids")
    if arguments.get("tokenizer-path"):
        return check.passed(name, f"tokenizer-path {arguments['tokenizer-path']}")
    files = _vocabularies(target)
    return check.judged(
        name,
        bool(files),
        ", ".join(files) or "the target's folder has none",
        "Complete the copy of the model, or set tokenizer-path.",
    )


def _tensor_parallel(target: Facts, arguments: Arguments) -> Check:
    size, heads = int(arguments.get("tp-size", 1)), target["text_config"].get("num_attention_heads")
    if heads is None:
        return check.not_applicable("tensor_parallel", "config.json tells no number of attention heads")
    return check.judged(
        "tensor_parallel",
        heads % size == 0,
        f"{heads} attention heads over tp-size {size}",
        "tp-size must divide the number of heads.",
    )


def _weights_fit(target: Facts, draft: Facts | None, arguments: Arguments, gpu_memory_mb: int | None) -> Check:
    name = "weights_fit"
    if gpu_memory_mb is None:
        return check.not_applicable(name, "no GPU is used")
    size = int(arguments.get("tp-size", 1))
    fraction = float(arguments.get("mem-fraction-static") or 1)
    need = (target["weight_bytes"] + (draft["weight_bytes"] if draft else 0)) / size / 2**20
    return check.judged(
        name,
        need < gpu_memory_mb * fraction,
        f"{need:.0f} MiB of weights a GPU; {fraction:g} of {gpu_memory_mb} MiB are for weights and KV cache",
        "Use more or larger GPUs, a quantised model, or a larger mem-fraction-static.",
    )


def _is_eagle3(draft: Facts) -> bool | None:
    """By the architecture's name, else by what ``fc`` takes: EAGLE 2 widths, EAGLE-3 one for each hidden state kept."""
    names = "".join(_architectures(draft)).lower()
    if "eagle3" in names:
        return True
    shape, width = draft["tensors"].get("fc.weight"), _target_width(draft)
    if shape and width and shape[1] != 2 * width:
        return bool(shape[1] == width * _hidden_states(draft))
    return False if "eagle" in names or shape else None


def _algorithm(draft: Facts, algorithm: str) -> Check:
    name = "draft_algorithm"
    found = ", ".join(_architectures(draft)) or "no architecture"
    is_eagle3 = _is_eagle3(draft)
    if is_eagle3 is None:
        return check.unknown(name, f"{found} is no known kind of draft", "See that SGLang's models have this name.")
    kind = "EAGLE3" if is_eagle3 else "EAGLE"
    return check.judged(
        name,
        kind == algorithm,
        f"{found} is for {kind}; speculative-algorithm is {algorithm}",
        f"Set speculative-algorithm to {kind}: with the other one SGLang serves, and accepts no draft token.",
    )


def _target_width(draft: Facts) -> int | None:
    config = draft["text_config"]
    width: int | None = config.get("target_hidden_size") or config.get("hidden_size")
    return width


def _hidden_states(draft: Facts) -> int:
    config = draft["text_config"]
    layers = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    return int(config.get("num_aux_hidden_states") or (len(layers) if layers else 3))


def _width(draft: Facts, target: Facts, algorithm: str) -> Check:
    name = "draft_width"
    of_draft, of_target = _target_width(draft), target["text_config"].get("hidden_size")
    if of_draft is None or of_target is None:
        return check.unknown(name, "config.json tells no hidden_size", "Compare the two models by hand.")
    takes = of_target * (_hidden_states(draft) if algorithm == "EAGLE3" else 2)
    shape = draft["tensors"].get("fc.weight")
    found = f"made for a hidden size of {of_draft}, the target's is {of_target}"
    found += f"; its fc takes {shape[1]} values, {takes} come" if shape else ""
    return check.judged(
        name,
        of_draft == of_target and (not shape or shape[1] == takes),
        found,
        "This draft was trained for another target: take the one made for it.",
    )


def _vocabulary(draft: Facts, target: Facts) -> Check:
    name = "draft_vocabulary"
    config, of_target = draft["text_config"], target["text_config"].get("vocab_size")
    of_draft, reduced = config.get("vocab_size"), config.get("draft_vocab_size")
    if of_draft is None or of_target is None:
        return check.unknown(name, "config.json tells no vocab_size", "Compare the two models by hand.")
    found = f"{of_draft} tokens, the target has {of_target}" + (f"; {reduced} are drafted" if reduced else "")
    if of_draft != of_target:
        return Check(name, check.FAIL, found, "This draft was trained for another target: take the one made for it.")
    if reduced and reduced < of_draft and draft["tensors"] and "d2t" not in draft["tensors"]:
        return Check(
            name,
            check.FAIL,
            f"{found}, and no d2t says which",
            "The draft's files lack the map of its vocabulary to the target's: complete the copy.",
        )
    return check.judged(name, not reduced or reduced <= of_draft, found, "draft_vocab_size must not be the larger one.")


def _same_tokenizer(draft: Facts, target: Facts) -> Check:
    """A draft needs no tokenizer; where one lies beside it, it tells which target the draft was trained for."""
    name = "draft_tokenizer"
    both = [file for file in _vocabularies(target) if file in draft["tokenizer"]]
    if not _vocabularies(draft):
        return check.not_applicable(name, "the draft brings none to compare: it uses the target's")
    if not both:
        return check.unknown(
            name,
            f"the draft has {', '.join(_vocabularies(draft))}, the target {', '.join(_vocabularies(target)) or 'none'}",
            "Compare the two by hand.",
        )
    of_draft, of_target = (model["tokenizer_sha256"][both[0]] for model in (draft, target))
    if of_draft is None or of_target is None:
        return check.unknown(name, f"{both[0]} cannot be read", "See who may read the models' folders.")
    return check.judged(
        name,
        of_draft == of_target,
        f"{both[0]} {of_draft[:12]}, the target's {of_target[:12]}",
        "Another tokenizer than the target's: see which target the draft was trained for.",
        otherwise=check.WARN,
    )
