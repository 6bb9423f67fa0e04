"""What goes with what. docs/gpu-host.md shows the same tables, with who says so; a test compares them."""

from __future__ import annotations

from collections.abc import Mapping

Version = tuple[int, ...]


def version(text: str) -> Version:
    """``"580.95.05"`` as a tuple of numbers, which compares as versions do. Raises ValueError."""
    return tuple(int(part) for part in text.split("."))


def text(version: Version) -> str:
    """A driver's version as NVIDIA writes it: ``(575, 51, 3)`` is 575.51.03."""
    return ".".join(f"{part:02}" for part in version)


DISTRIBUTIONS: Mapping[tuple[str, str], str] = {
    ("ubuntu", "22.04"): "Ubuntu 22.04",
    ("ubuntu", "24.04"): "Ubuntu 24.04",
    ("debian", "12"): "Debian 12",
}
"""(ID, VERSION_ID) of /etc/os-release to a name. All three are native distributions of CUDA 13.0; the rehearsal runs
Debian 12 only."""

KERNELS: Mapping[tuple[str, str], Version] = {
    ("ubuntu", "22.04"): (5, 15),
    ("ubuntu", "24.04"): (6, 8),
    ("debian", "12"): (6, 1),
}
"""The kernel that each distribution was released with: NVIDIA names newer ones as those that it tests with."""

DRIVERS: Mapping[str, Version] = {
    "12.8": (570, 26),
    "12.9": (575, 51, 3),
    "13": (580, 65, 6),
}
"""CUDA to the oldest driver for Linux with which it runs; "13" stands for each 13.x, by minor-version compatibility."""

CAPABILITIES: Mapping[str, tuple[str, Version]] = {
    "8.0": ("Ampere", (11, 0)),
    "8.6": ("Ampere", (11, 1)),
    "8.9": ("Ada", (11, 8)),
    "9.0": ("Hopper", (11, 8)),
    "10.0": ("Blackwell, sm100", (12, 8)),
    "10.3": ("Blackwell Ultra, sm103", (12, 9)),
    "12.0": ("Blackwell, sm120", (12, 8)),
}
"""Compute capability to its architecture and the first CUDA that compiles for it."""

PYTHON_FROM: Version = (3, 11)
"""The oldest Python that the lock files are resolved for."""

OPEN_MODULES_FROM: Version = (10, 0)
"""From this compute capability on the driver works with the open kernel modules only."""


def oldest_driver(cuda: str) -> Version | None:
    """The oldest driver for a CUDA such as 13.0; None where the table does not have it."""
    return DRIVERS.get(cuda) or DRIVERS.get(cuda.partition(".")[0])
