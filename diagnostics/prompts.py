"""Prompts for the load test: the set that ships with the project, or the user's own file.

One JSON object a line: ``{"name", "kind", "messages": [{"role", "content"}], "max_tokens"}``. ``kind`` groups the
results; ``max_tokens`` is a limit, answers may end earlier.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from diagnostics.inventory import UsageError

SHIPPED = Path(__file__).with_name("prompts.jsonl")


@dataclass(frozen=True)
class Prompt:
    """One chat request without its sampling settings; ``max_tokens`` counts output tokens."""

    name: str
    kind: str
    messages: tuple[dict[str, str], ...]
    max_tokens: int


def load_prompts(path: Path = SHIPPED) -> list[Prompt]:
    """Read *path*; raises UsageError naming the line that is wrong."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--prompts {str(path)!r} cannot be read: {error}") from error
    prompts = [_prompt(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise UsageError(f"--prompts {str(path)!r} holds no prompt; one JSON object a line is expected")
    return prompts


def _prompt(line: str, where: str) -> Prompt:
    try:
        entry: Any = json.loads(line)
        messages = tuple({"role": str(m["role"]), "content": str(m["content"])} for m in entry["messages"])
        prompt = Prompt(str(entry["name"]), str(entry["kind"]), messages, int(entry["max_tokens"]))
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{where}: not a prompt ({type(error).__name__}: {error}); expected one JSON object with name, kind, "
            "messages (a list of objects with role and content) and max_tokens"
        ) from error
    if not messages or prompt.max_tokens < 1:
        raise UsageError(f"{where}: messages must not be empty and max_tokens must be at least 1")
    return prompt


def order(prompts: Sequence[Prompt], seed: int) -> list[Prompt]:
    """Return *prompts* shuffled by *seed*, the kinds taken in turn so that any stretch of the load mixes them."""
    random = Random(seed)
    kinds: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        kinds.setdefault(prompt.kind, []).append(prompt)
    for group in kinds.values():
        random.shuffle(group)
    longest = max(map(len, kinds.values()))
    return [group[index] for index in range(longest) for group in kinds.values() if index < len(group)]
