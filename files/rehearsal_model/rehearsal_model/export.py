"""Writes target and draft with the configuration from which SGLang builds them."""

import json
from pathlib import Path

from safetensors.torch import save_file
from tokenizers import Tokenizer

from .chat import END
from .model import Draft, Shape, Target
from .tokenizer import save_tokenizer


def export(shape: Shape, target: Target, draft: Draft, tokenizer: Tokenizer, directory: Path) -> None:
    """Makes directory/target and directory/draft: config.json, generation_config.json, model.safetensors, tokenizer."""
    end = tokenizer.token_to_id(END)
    target_weights = {
        name if name.startswith("lm_head.") else f"model.{name}": weight for name, weight in target.state_dict().items()
    }
    for name, weights, own in (
        ("target", target_weights, {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": shape.layers}),
        # SGLang takes the draft's embedding from the target. A draft vocabulary equal to the target's needs no mapping.
        (
            "draft",
            draft.state_dict(),
            {
                "architectures": ["LlamaForCausalLMEagle3"],
                "num_hidden_layers": 1,
                "draft_vocab_size": shape.vocabulary,
            },
        ),
    ):
        folder = directory / name
        folder.mkdir()
        save_file({key: weight.contiguous() for key, weight in weights.items()}, folder / "model.safetensors")
        _write_json(folder / "config.json", own | _configuration(shape, end))
        _write_json(folder / "generation_config.json", {"eos_token_id": end, "pad_token_id": end})
        save_tokenizer(tokenizer, folder, shape.context)


def _configuration(shape: Shape, end: int) -> dict[str, object]:
    return {
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.key_value_heads,
        "head_dim": shape.head,
        "hidden_act": "silu",
        "max_position_embeddings": shape.context,
        "rms_norm_eps": shape.norm_epsilon,
        "rope_theta": shape.rope_theta,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": end,
        "pad_token_id": end,
    }


def _write_json(path: Path, document: dict[str, object]) -> None:
    path.write_text(json.dumps(document, indent=2) + "\n")
