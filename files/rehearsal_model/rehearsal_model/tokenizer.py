"""A small byte-level BPE tokenizer, trained on the text and saved as Hugging Face libraries read it."""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from .chat import END, SPECIAL_TOKENS, TEMPLATE


def train_tokenizer(texts: Iterable[str], vocabulary_size: int) -> Tokenizer:
    """Every byte is in the vocabulary, so any text can be read and any grammar can be written.

    The special tokens are ids 0 to 3; END is 0.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=[AddedToken(token, special=True) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, directory: Path, context_length: int) -> None:
    """Writes tokenizer.json and tokenizer_config.json, the latter with the chat template."""
    tokenizer.save(str(directory / "tokenizer.json"))
    configuration = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": END,
        "pad_token": END,
        "model_max_length": context_length,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(configuration, indent=2) + "\n")
