"""Zero-bubble orders: the backward in two parts, I, which the previous stage waits for, and W, which waits.

For N = 3, M = 4 and K = 3, 2, 1 (zb-h1):

    0  F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3
    1     F0 F1 I0 F2 I1 W0 F3 I2 W1 I3 W2 W3       W a micro-batch behind I
    2        F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3    W two behind
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bapipe.errors import BaPipeError
from bapipe.schedule.actions import Kind, Schedule
from bapipe.schedule.inflight import stage_caps, weight_gradient_delays
from bapipe.schedule.lane_builders import pipeline_schedule, require_sizes

__all__ = ["zb_h1", "zb_h2", "zero_bubble"]


def zero_bubble(
    num_stages: int,
    num_microbatches: int,
    caps: Sequence[int],
    *,
    delays: Sequence[int] | None = None,
    name: str = "zb",
) -> Schedule:
    """F × K_i, then I [W] F in turn; the W of stage i is delays[i] micro-batches behind its I.

    At most K_i micro-batches then wait for I and delays[i] for W. Without delays given, stage i has K_0 − K_i, so
    that every stage holds K_0 micro-batches: later ones fill with W the time in which the first errors go back.
    """
    require_sizes(num_stages, num_microbatches)
    if len(caps) != num_stages:
        raise BaPipeError(f"{num_stages} stages need {num_stages} caps, got {len(caps)}; give one K per stage")
    if min(caps) < 1:
        raise BaPipeError(f"a cap must be at least 1, got {min(caps)}; a stage must hold one micro-batch")
    behind = weight_gradient_delays(caps) if delays is None else list(delays)
    if len(behind) != num_stages or min(behind) < 0:
        raise BaPipeError(f"{num_stages} stages need {num_stages} delays of at least 0, got {behind[:16]}")
    microbatches = np.arange(num_microbatches, dtype=np.int64)
    rows = np.stack(
        [np.repeat([int(Kind.F), int(Kind.I), int(Kind.W)], num_microbatches), np.tile(microbatches, 3)]
    )
    actions = []
    for cap, delay in zip(caps, behind, strict=True):
        # Three places a micro-batch: I, what W is due, and F; the first K forwards come before them.
        places = (3 * (microbatches - cap) + 2, 3 * microbatches, 3 * (microbatches + delay) + 1)
        actions.append(rows[:, np.argsort(np.concatenate(places), kind="stable")].T)
    held = [cap + delay for cap, delay in zip(caps, behind, strict=True)]
    return pipeline_schedule(actions, num_microbatches, name=name, caps=held)


def zb_h1(num_stages: int, num_microbatches: int) -> Schedule:
    """ZB-H1: bubble (N−1)(F+I−W) with 1F1B's memory of N micro-batches at every stage."""
    require_sizes(num_stages, num_microbatches)
    caps = stage_caps("zb-h1", [1] * num_stages, num_microbatches)
    return zero_bubble(num_stages, num_microbatches, caps, name="zb-h1")


def zb_h2(num_stages: int, num_microbatches: int) -> Schedule:
    """ZB-H2: bubble (N−1)(F+I−2W) within each rank's own span, with 2N−1 micro-batches at every stage."""
    require_sizes(num_stages, num_microbatches)
    caps = stage_caps("zb-h2", [1] * num_stages, num_microbatches)
    return zero_bubble(num_stages, num_microbatches, caps, name="zb-h2")
