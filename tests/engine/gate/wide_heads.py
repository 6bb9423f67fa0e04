"""The rehearsal model for attention kernels that know no heads of 32 and no float32: FlashAttention 3 and FlashInfer.

    python tests/engine/gate/wide_heads.py PAIR WIDE    # by an interpreter with torch and transformers

WIDE computes what PAIR does, with heads of 128: their rows are padded by zeros, at the places where rotary embedding
turns them alike. In half precision a greedy token may hang on rounding, so the prompts in WIDE come in the order of how
clearly the model decides on their continuation, the clearest first.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

WIDTH = 128
LENGTHS = (7, 30, 48)  # of prompts, as in check_plain.py
TOKENS = 96


def widen(weights: dict[str, torch.Tensor], head: int) -> dict[str, torch.Tensor]:
    """Pad the attention of each layer from `head` to WIDTH: q, k, v (heads x head, in) and o (out, heads x head)."""
    half = head // 2
    # Rotary embedding pairs a head's first half with its second.
    places = torch.cat([torch.arange(half), WIDTH // 2 + torch.arange(half)])

    def rows(weight: torch.Tensor) -> torch.Tensor:
        heads = weight.shape[0] // head
        wide = weight.new_zeros(heads, WIDTH, weight.shape[1])
        wide[:, places] = weight.view(heads, head, -1)
        return wide.view(heads * WIDTH, -1)

    widened = dict(weights)
    for name, weight in weights.items():
        match name.split(".")[-2]:
            case "q_proj":  # scores are divided by the root of the head's width
                widened[name] = rows(weight) * (WIDTH / head) ** 0.5
            case "k_proj" | "v_proj":
                widened[name] = rows(weight)
            case "o_proj":
                widened[name] = rows(weight.T).T.contiguous()
    return widened


def least_margin(model: LlamaForCausalLM, prompt: list[int]) -> float:
    """The least distance between the best and the second-best logit over the greedy continuations of its prefixes."""
    least = float("inf")
    for length in LENGTHS:
        ids, past = torch.tensor([prompt[:length]]), None
        for _ in range(TOKENS):
            output = model(ids, past_key_values=past, use_cache=True)
            past = output.past_key_values
            best = output.logits[0, -1].topk(2)
            least = min(least, float(best.values[0] - best.values[1]))
            ids = best.indices[:1].view(1, 1)
    return least


def write_models(pair: Path, wide: Path) -> None:
    """Write the target and the draft with wide heads."""
    for part in ("target", "draft"):
        shutil.copytree(pair / part, wide / part)
        config = json.loads((pair / part / "config.json").read_text())
        head = config["head_dim"]
        # The frequencies are theta ** (-2 i / width): those of the first places stay as they were.
        config |= {"head_dim": WIDTH, "rope_theta": config["rope_theta"] ** (WIDTH // head)}
        (wide / part / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        save_file(widen(load_file(pair / part / "model.safetensors"), head), wide / part / "model.safetensors")


@torch.inference_mode()
def write_prompts(pair: Path, wide: Path) -> None:
    """Check that the targets compute the same, and write the prompts in their order."""
    ids = torch.randint(0, 512, (2, 40), generator=torch.Generator().manual_seed(1))
    before, after = (LlamaForCausalLM.from_pretrained(folder / "target") for folder in (pair, wide))
    torch.testing.assert_close(after(ids).logits, before(ids).logits, rtol=0, atol=1e-3)
    prompts = json.loads((pair / "prompts.json").read_text())["prompts"]
    margins = {index: least_margin(before, prompt) for index, prompt in enumerate(prompts)}
    order = sorted(margins, key=lambda index: -margins[index])
    print("least margins of logits:", [round(margins[index], 2) for index in order])
    (wide / "prompts.json").write_text(json.dumps({"prompts": [prompts[index] for index in order]}))


if __name__ == "__main__":
    folders = Path(sys.argv[1]), Path(sys.argv[2])
    write_models(*folders)
    write_prompts(*folders)
