"""Parses what NVIDIA's driver and programs print. Pure: text in, values out."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass

Row = Mapping[str, str]
"""A GPU's fields as ``nvidia-smi --query-gpu`` names them, without units; values are as printed."""

_UNIT = re.compile(r" (?:MiB|W|MHz|%)$")
_ABSENT = {"[n/a]", "n/a", "[not supported]", "[unknown error]", ""}


def gpus(text: str) -> list[Row]:
    """Parse ``nvidia-smi --query-gpu=... --format=csv``.

    Raises ValueError, with the text's first line, when it is something else: an error message, for example.
    """
    rows = list(csv.reader(text.strip().splitlines(), skipinitialspace=True))
    if not rows or len(rows[0]) < 2:
        raise ValueError(f"nvidia-smi said: {text.strip().splitlines()[0] if text.strip() else 'nothing'}")
    names = [name.partition(" [")[0] for name in rows[0]]
    if bad := [row for row in rows[1:] if len(row) != len(names)]:
        raise ValueError(f"nvidia-smi said: {', '.join(bad[0])}")
    return [dict(zip(names, (_UNIT.sub("", value.strip()) for value in row), strict=True)) for row in rows[1:]]


def number(row: Row, field: str) -> int | None:
    """A field as a number; None where the card does not have it ("[N/A]")."""
    value = row.get(field, "")
    return int(value) if value.isdecimal() else None


def is_absent(value: str) -> bool:
    """Whether a card said that it does not have what was asked for."""
    return value.strip().lower() in _ABSENT


@dataclass(frozen=True)
class Topology:
    """How the GPUs of a host are connected.

    ``links`` maps a pair of GPU numbers (the lower first) to the kind of its connection: ``NV18`` is 18 NVLinks, the
    others name what PCIe traffic crosses, from ``PIX`` (one switch) to ``SYS`` (from one socket to another).
    ``numa`` maps a GPU to its NUMA node, None where the host does not tell.
    """

    links: Mapping[tuple[int, int], str]
    numa: Mapping[int, str | None]

    def pairs(self, *kinds: str) -> list[tuple[int, int]]:
        """The pairs whose kind begins with one of `kinds`."""
        return [pair for pair, kind in self.links.items() if kind.startswith(kinds)]


def _lines(text: str) -> list[str]:
    """The lines that are not empty, without a terminal's colours."""
    return [line for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines() if line.strip()]


def topology(text: str) -> Topology:
    """Parse ``nvidia-smi topo -m``. Raises ValueError when there is no matrix in it."""
    lines = _lines(text)
    head = next((line.split() for line in lines if re.match(r"\s*GPU0\b.*(?:Affinity|GPU)", line)), None)
    rows = [line for line in lines if re.match(r"\s*GPU\d+\s+(?:X|[A-Z]{2})", line) and line.split() != head]
    if head is None or not rows:
        raise ValueError(f"nvidia-smi topo -m said: {lines[0].strip() if lines else 'nothing'}")
    columns = [name for name in head if re.fullmatch(r"(?:GPU|NIC|mlx\w*_)\d+\w*", name)]
    links: dict[tuple[int, int], str] = {}
    numa: dict[int, str | None] = {}
    for line in rows:
        name, *cells = line.split()
        gpu = int(name.removeprefix("GPU"))
        for column, kind in zip(columns, cells, strict=False):
            if column.startswith("GPU") and kind != "X":
                other = int(column.removeprefix("GPU"))
                links[min(gpu, other), max(gpu, other)] = kind
        # "CPU Affinity" and "NUMA Affinity" follow the columns of devices; the former is one word, the latter too.
        affinity = cells[len(columns) :]
        node = affinity[1] if len(affinity) > 1 else ""
        numa[gpu] = None if is_absent(node) else node
    return Topology(links, numa)


def peers(text: str) -> dict[tuple[int, int], str]:
    """Parse ``nvidia-smi topo -p2p r``: pair of GPUs, reader first, to ``OK`` or why not (``GNS``, ``CNS``, ``DR``...).

    Raises ValueError when there is no matrix in it.
    """
    rows = [line.split() for line in _lines(text)]
    head = next((row for row in rows if row[0] == "GPU0" and row[-1].startswith("GPU")), None)
    cells = [row for row in rows if row is not head and re.fullmatch(r"GPU\d+", row[0])]
    if head is None or [row[0] for row in cells] != head or any(len(row) != len(head) + 1 for row in cells):
        raise ValueError(f"nvidia-smi topo -p2p r said: {' '.join(rows[0]) if rows else 'nothing'}")
    return {
        (reader, other): state
        for reader, row in enumerate(cells)
        for other, state in enumerate(row[1:])
        if other != reader
    }


@dataclass(frozen=True)
class Driver:
    """The kernel modules that are loaded."""

    version: str
    is_open: bool


def driver(text: str) -> Driver:
    """Parse ``/proc/driver/nvidia/version``. Raises ValueError when it names no version."""
    found = re.search(r"NVRM version:.*?(Open )?Kernel Module.*?\s(\d+\.\d+(?:\.\d+)?)\s", text + " ")
    if found is None:
        raise ValueError(f"/proc/driver/nvidia/version says: {text.partition(chr(10))[0]}")
    return Driver(found[2], found[1] is not None)


def toolkit(text: str) -> str | None:
    """CUDA's version as ``nvcc --version`` tells it, such as 13.0."""
    found = re.search(r"release (\d+\.\d+)", text)
    return found[1] if found else None
