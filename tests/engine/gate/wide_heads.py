"""The rehearsal model for attention kernels that know no heads of 32 and no float32: FlashAttention 3 and FlashInfer.

    python tests/engine/gate/wide_heads.py PAIR WIDE    # by an interpreter with torch and transformers

WIDE computes what PAIR does, with heads of 128: their rows are padded by zeros, at the places where rotary embedding
turns them alike.
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


@torch.inference_mode()
def main(pair: Path, wide: Path) -> None:
    """Write WIDE, and check that its target computes what that of PAIR does."""
    for part in ("target", "draft"):
        shutil.copytree(pair / part, wide / part)
        config = json.loads((pair / part / "config.json").read_text())
        head = config["head_dim"]
        # The frequencies are theta ** (-2 i / width): those of the first places stay as they were.
        config |= {"head_dim": WIDTH, "rope_theta": config["rope_theta"] ** (WIDTH // head)}
        (wide / part / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        save_file(widen(load_file(pair / part / "model.safetensors"), head), wide / part / "model.safetensors")
    shutil.copy(pair / "prompts.json", wide)
    ids = torch.randint(0, 512, (2, 40), generator=torch.Generator().manual_seed(1))
    before, after = (LlamaForCausalLM.from_pretrained(folder / "target") for folder in (pair, wide))
    torch.testing.assert_close(after(ids).logits, before(ids).logits, rtol=0, atol=1e-3)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
