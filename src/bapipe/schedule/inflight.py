"""Micro-batches in flight: how many a stage holds under each schedule. The one place that says so.

K_i counts those between a stage's forward and the backward that the stage before waits for. It goes by d, the
ranks from stage i to the end of the pipeline: N−i+1 without replicas. Schedules, the planner's estimates before
there is one, and the FPGAs' memory all ask here.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

__all__ = [
    "declining_caps",
    "full_overlap_caps",
    "inflight_microbatches",
    "interleaved_warm_up",
    "most_inflight",
    "never_rising",
    "ranks_behind",
    "stage_caps",
    "v_activations",
    "waiting_microbatches",
    "weight_gradient_delays",
]

_BY_RANKS = {
    "1f1b": (1, 0),
    "1f1b-sno": (1, 0),
    "1f1b-so": (2, 0),
    "1f1b-as": (1, 0),
    "fbp-as": (2, 0),
    "pipedream": (1, 0),
    "zb": (1, 0),
    "zb-h1": (1, 0),
    "zb-h2": (2, -1),
}
"""(a, b) of K = a·d + b; of 1f1b and zb the least they may have (Tables I and II for the paper's)"""
_DELAYED = ("zb-h1", "zb-h2")
"""schedules whose weight gradients wait so long that every stage holds as many micro-batches as the first"""


def most_inflight(schedule: str, behind: int, microbatches: int) -> int:
    """K of a stage, by the number of ranks from it to the end; gpipe holds all M, no other looks at M."""
    if schedule == "gpipe":
        return microbatches
    slope, more = _BY_RANKS[schedule]
    return slope * behind + more


def ranks_behind(replicas: Sequence[int]) -> list[int]:
    """d of every stage."""
    return [sum(replicas[stage:]) for stage in range(len(replicas))]


def stage_caps(schedule: str, replicas: Sequence[int], microbatches: int) -> list[int]:
    """K of every stage, all its replicas together, which may be more than M."""
    return [most_inflight(schedule, behind, microbatches) for behind in ranks_behind(replicas)]


def inflight_microbatches(
    schedule: str, behind: int, microbatches: int, *, ranks: int = 0, first: int | None = None
) -> int:
    """K of a stage, at most M; `first`: K of the first stage, where that is given for 1f1b."""
    own = most_inflight(schedule, behind, microbatches) if first is None else _on_line(first, behind, ranks)
    return max(1, min(own, microbatches))


def waiting_microbatches(schedule: str, behind: int, microbatches: int, *, ranks: int) -> int:
    """Micro-batches there that only wait for their weight gradients."""
    if schedule not in _DELAYED:
        return 0
    whole, own = (inflight_microbatches(schedule, d, microbatches) for d in (ranks, behind))
    return whole - own


def weight_gradient_delays(caps: Sequence[int]) -> list[int]:
    """By how many micro-batches weight gradients wait so that every stage holds as many as the first."""
    return [max(0, caps[0] - cap) for cap in caps]


def interleaved_warm_up(ranks: int, rank: int, virtual: int) -> int:
    """Forwards of a rank before its first backward where each has `virtual` stages: 2(N−r−1) + (v−1)N."""
    return 2 * (ranks - rank - 1) + (virtual - 1) * ranks


def v_activations(schedule: str, ranks: int) -> int:
    """Activations of its two stages, together, that a rank of a V-shaped schedule holds at most, as published.

    Two of them are one micro-batch of all that the rank has: zb-v holds N of these, like 1F1B, v-half ⌊(N+2)/2⌋
    and v-min ⌊(N+4)/3⌋; dualpipe-v one activation more than zb-v.
    """
    whole = {"zb-v": ranks, "v-half": (ranks + 2) // 2, "v-min": (ranks + 4) // 3, "dualpipe-v": ranks}[schedule]
    return 2 * whole + (schedule == "dualpipe-v")


def declining_caps(first: int, replicas: Sequence[int], microbatches: int) -> list[int]:
    """K_i where only the first stage's K is given: evenly down to 1 at the last stage, rounded up.

    K_i = 1 + ⌈(K − 1)(N − i)/(N − 1)⌉, from 1: with K = N that is 1F1B-SNO, and where every stage and transfer is
    alike, `full_overlap_caps` lies on such a line. With replicas, ranks are counted instead of stages, and each
    replica of a stage holds at least one. No K exceeds the micro-batches, and none that of the stage before it.
    """
    ranks = ranks_behind(replicas)
    line = [_on_line(first, behind, ranks[0], last=replicas[-1]) for behind in ranks]
    return never_rising(
        [max(min(max(cap, own), microbatches), 1) for cap, own in zip(line, replicas, strict=True)]
    )


def _on_line(first: int, behind: int, ranks: int, *, last: int = 1) -> int:
    """K at `behind` ranks from the end, evenly from `first` at all of them down to `last` at the last stage's."""
    whole = ranks - last
    return last - (last - first) * (behind - last) // whole if whole > 0 else first


def never_rising(caps: Sequence[int]) -> list[int]:
    """The caps, none less than that of the stage after it."""
    return list(itertools.accumulate(reversed(caps), max))[::-1]


def full_overlap_caps(
    forward: Sequence[float],
    backward: Sequence[float],
    send_forward: Sequence[float] = (),
    send_backward: Sequence[float] = (),
) -> tuple[int, ...]:
    """The least K_i with which no transfer delays the steady state of an after-compute pipeline.

    Uniform stages: K_i = 1 + (N−i)(1 + ⌈2SR/(F+B)⌉), one activation per stage less than 1F1B-SO while
    SR ≤ (F+B)/2. In general, with P = max(F_i+B_i): going back from d_N = F_N, K_N = 1,
    d = d_{i+1} + F_i + B_{i+1} + SF_i + SB_i, K_i = ⌈(d + B_i)/P⌉, d_i = max(d, (K_i−1)P + F_i).
    """
    count = len(forward)
    sends_f = list(send_forward) or [0.0] * (count - 1)
    sends_b = list(send_backward) or [0.0] * (count - 1)
    period = max(f + b for f, b in zip(forward, backward, strict=True))
    caps = [1] * count
    delay = forward[-1]
    for i in range(count - 2, -1, -1):
        turn = delay + forward[i] + backward[i + 1] + sends_f[i] + sends_b[i]
        periods = (turn + backward[i]) / period
        # A quotient a hair over an integer is rounding of the inputs, not one more micro-batch in flight.
        caps[i] = max(1, int(np.ceil(periods - 1e-9)))
        delay = max(turn, (caps[i] - 1) * period + forward[i])
    return tuple(caps)
