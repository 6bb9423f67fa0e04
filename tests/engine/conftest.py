"""Fixtures for the tests on the CPU engine: the trained pair and its prompts."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import NamedTuple

import pytest

pytest.importorskip("sglang", reason="needs the CPU engine's environment")


class Pair(NamedTuple):
    target: str
    draft: str


@pytest.fixture(scope="session")
def pair() -> Pair:
    folder = Path(os.environ["SPECGATE_PAIR"])
    return Pair(str(folder / "target"), str(folder / "draft"))


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    return json.loads(Path(os.environ["SPECGATE_PAIR"], "prompts.json").read_text())["prompts"]
