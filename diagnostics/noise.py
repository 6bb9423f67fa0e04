"""Whether two arms that were measured in the same rounds differ by more than their noise.

The rounds are interleaved, so what a round does to one arm (a warmer machine, a busy neighbour) it does to the other,
and only their ratio within the round counts. The logarithms of these ratios are taken for a sample of a normal
distribution; Student's t gives the interval that holds the true ratio with 95 % confidence. A difference is called only
where that interval leaves out 1, and never from fewer than three rounds: two can agree by chance.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

LEAST_ROUNDS = 3

# Student's t for a two-sided 95 % interval, by degrees of freedom from 2; the last serves for more than 30 as well.
_T = (
    4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110,
    2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


@dataclass(frozen=True)
class Difference:
    """How one arm's figure stands to another's: their ratio (geometric mean over the rounds), its interval, a word.

    ``interval`` is None where there were too few rounds, and then nothing is called.
    """

    ratio: float
    interval: tuple[float, float] | None
    says: Literal["faster", "slower", "within the noise", "too few rounds"]


def difference(values: Sequence[float], against: Sequence[float]) -> Difference:
    """Compare a figure of which more is better (tok/s), one value a round, round by round; all must be positive."""
    logs = [math.log(value / other) for value, other in zip(values, against, strict=True)]
    middle = statistics.fmean(logs)
    if len(logs) < LEAST_ROUNDS:
        return Difference(math.exp(middle), None, "too few rounds")
    half = _T[min(len(logs) - LEAST_ROUNDS, len(_T) - 1)] * statistics.stdev(logs) / math.sqrt(len(logs))
    low, high = math.exp(middle - half), math.exp(middle + half)
    says: Literal["faster", "slower", "within the noise"] = (
        "faster" if low > 1 else "slower" if high < 1 else "within the noise"
    )
    return Difference(math.exp(middle), (low, high), says)
