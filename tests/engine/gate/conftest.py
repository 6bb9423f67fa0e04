"""The rehearsal model in $SPECGATE_PAIR, prompts.json beside it: token ids of 12 prompts or more, 48 long or more."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import NamedTuple

import pytest


class Pair(NamedTuple):
    """Folders of the target and its draft."""

    target: str
    draft: str


@pytest.fixture(scope="session")
def pair() -> Pair:
    folder = Path(os.environ["SPECGATE_PAIR"])
    return Pair(str(folder / "target"), str(folder / "draft"))


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    return json.loads(Path(os.environ["SPECGATE_PAIR"], "prompts.json").read_text())["prompts"]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What shares a scheduler stays in one process, where pytest-xdist has several."""
    for item in (item for item in items if item.path.parent == Path(__file__).parent):
        served = {"scheduler", "worker"} & item.callspec.params.keys()
        item.add_marker(pytest.mark.xdist_group(f"{item.path.stem} {item.callspec.params[served.pop()]}"))
