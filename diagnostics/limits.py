"""Limits of acceptance: what a measurement must keep to, each told with the value found and the value set."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import ge, gt, le
from typing import Any


@dataclass(frozen=True)
class Limit:
    """One limit: *found* is what was measured, None where nothing was; then the limit counts as not kept."""

    name: str
    found: float | None
    rule: str  # "at most", "at least" or "more than"
    allowed: float
    unit: str = ""
    detail: str = ""

    @property
    def kept(self) -> bool:
        """Whether what was found is allowed."""
        return self.found is not None and _RULES[self.rule](self.found, self.allowed)

    def document(self) -> dict[str, Any]:
        """``{"name", "found", "rule", "allowed", "kept"}``."""
        return {
            "name": self.name,
            "found": self.found,
            "rule": self.rule,
            "allowed": self.allowed,
            "kept": self.kept,
        }

    def problem(self) -> str | None:
        """One sentence that names the limit, the value found and the value set; None when it is kept."""
        if self.kept:
            return None
        found = "not measured" if self.found is None else f"{self.found:.4g}{self.unit}"
        detail = f" ({self.detail})" if self.detail else ""
        return f"{self.name}: {found}{detail}; allowed is {self.rule} {self.allowed:g}{self.unit}"


_RULES: Mapping[str, Callable[[float, float], bool]] = {"at most": le, "at least": ge, "more than": gt}


@dataclass(frozen=True, kw_only=True)
class LoadLimits:
    """What ``fab load`` holds a load to; None leaves a limit out.

    ``errors``: requests without an answer. ``ttft_p95``: 95th percentile of the time to the first token, in seconds.
    ``throughput_loss``: per cent of the output tokens a second of the better arm (gate held open, gate held closed)
    that the gate may lose.
    """

    errors: int = 0
    ttft_p95: float | None = None
    throughput_loss: float | None = None
