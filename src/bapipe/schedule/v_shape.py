"""V-shaped orders: rank r holds stages r and 2N−1−r, so that the model goes down the ranks and back up.

    rank 0   0 ↓       ↑ 5        stages of N = 3; from 2 to 3 nothing is sent
    rank 1     1 ↓   ↑ 4          the first rank has the loss, and its backward begins at once
    rank 2       2 → 3

A stage holds activations for long where its partner holds them briefly, so all ranks hold as much. These are the
published orders for stages and kinds of action that are all alike (F = I = W); `bapipe.schedule.v_order` makes
orders for given times. Sources: Zero Bubble Pipeline Parallelism (ZB-V), Pipeline Parallelism with Controllable
Memory (V-Half, V-Min), DeepSeek's DualPipe (DualPipeV).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bapipe.schedule.actions import Kind, Lane, Schedule
from bapipe.schedule.lane_builders import require_sizes

__all__ = ["V_SHAPED", "dualpipe_v", "v_half", "v_min", "v_placement", "v_schedule", "zb_v"]

V_SHAPED = ("zb-v", "v-half", "v-min", "dualpipe-v")
"""the schedules that place stages so"""

_F, _B, _I, _W = int(Kind.F), int(Kind.B), int(Kind.I), int(Kind.W)
Ints = NDArray[np.int64]
_Rows = list[tuple[int, int, int]]
"""kind, half of the V (0: down, 1: up) and micro-batch"""


def v_placement(num_ranks: int) -> tuple[tuple[int, ...], ...]:
    """The rank of each of 2N stages."""
    down = [(rank,) for rank in range(num_ranks)]
    return (*down, *reversed(down))


def v_schedule(
    name: str, actions: Sequence[Sequence[tuple[int, int, int]] | Ints], num_microbatches: int
) -> Schedule:
    """Every rank's kinds, stages and micro-batches in order, as a schedule of two stages a rank."""
    lanes = []
    for rank, own in enumerate(actions):
        table = np.array(own, dtype=np.int64).reshape(-1, 3)
        lanes.append(Lane(rank, table[:, 0].copy(), table[:, 1].copy(), table[:, 2].copy()))
    return Schedule(
        name=name,
        num_stages=2 * len(lanes),
        num_microbatches=num_microbatches,
        placement=v_placement(len(lanes)),
        lanes=tuple(lanes),
    )


def zb_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """ZB-V: no bubble within a rank's span where F = I = W and M ≥ 2N−1, with 1F1B's memory of N micro-batches.

    N = 2, M = 3:
        0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2
        1      1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2
    """
    require_sizes(num_ranks, num_microbatches)
    count, made = max(num_microbatches, 2 * num_ranks - 1), []
    for rank in range(num_ranks):
        order = _InTurn()
        order.add([(_F, 0)], 2 * (num_ranks - rank) - 1)
        order.add([(_F, 1), (_F, 0)], rank)
        order.add([(_F, 1), (_I, 1), (_W, 1)], num_ranks - rank)
        rest = count - order.done(_F, 0)
        order.add([(_F, 0), (_I, 0), (_W, 0), (_F, 1), (_I, 1), (_W, 1)], rest)
        order.add([(_I, 0), (_W, 0), (_F, 1), (_I, 1), (_W, 1)], count - order.done(_F, 1))
        order.add([(_I, 0), (_I, 1)], rank)
        order.add([(_I, 0), (_W, 0)], num_ranks - rank)
        order.add([(_W, 1)], count - order.done(_W, 1))
        order.add([(_W, 0)], count - order.done(_W, 0))
        made.append(order.rows())
    return _without_padding("zb-v", made, num_microbatches)


def dualpipe_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """DualPipeV: F of one half beside B of the other; ZB-V's memory and the activation of one more stage.

    Published for accelerators that run such an F and B at once. BaPipe runs and times them one after the other.
    Fewer than 2N micro-batches are filled up in thought, and the missing ones left out.
    """
    require_sizes(num_ranks, num_microbatches)
    count, made = max(num_microbatches, 2 * num_ranks), []
    for rank in range(num_ranks):
        order, after = _Order(), num_ranks - rank - 1
        order.add([(_F, 0)], 2 * after)
        order.add([(_F, 0), (_F, 1)], rank + 1)
        order.add([(_I, 1), (_W, 1), (_F, 1)], after)
        order.add([(_F, 0), (_B, 1), (_F, 1), (_B, 0)], count - order.done(_F, 0))
        order.add([(_B, 1), (_F, 1), (_B, 0)], after)
        # Of the last backwards the second half is done in two parts, from one half of the V on and then the other.
        whole = rank + 1
        for place in range(2 * (rank + 1)):
            order.add([(_B if place < whole else _I, 1 - place % 2)])
        order.add([(_W, None), (_I, 0)], after)
        order.add([(_W, None)], len(order.waiting))
        made.append(np.array(order.rows, np.int64))
    return _without_padding("dualpipe-v", made, num_microbatches)


def v_half(num_ranks: int, num_microbatches: int) -> Schedule:
    """V-Half: about half of 1F1B's memory, ⌊(N+2)/2⌋ micro-batches; a bubble of about 3N actions if F = I = W."""
    waits = (2, 1, 1) if num_ranks % 2 else (4, 1, 5)
    return _repeated("v-half", num_ranks, num_microbatches, steps=(1, 2, 1, 2), waits=waits)


def v_min(num_ranks: int, num_microbatches: int) -> Schedule:
    """V-Min: a third of 1F1B's memory, ⌊(N+4)/3⌋ micro-batches; a bubble of about 4N actions if F = I = W."""
    waits = (1, 1, 1) if num_ranks % 3 else (3, 1, 3)
    return _repeated("v-min", num_ranks, num_microbatches, steps=(1, 1, 1, 1), waits=waits)


class _InTurn:
    """A rank's actions while they are made, micro-batches of each kind and half in turn."""

    def __init__(self) -> None:
        self._steps: list[tuple[int, int]] = []
        """kind and half"""
        self._done: Counter[tuple[int, int]] = Counter()

    def done(self, kind: int, half: int) -> int:
        """How many of these there are."""
        return self._done[kind, half]

    def add(self, actions: Sequence[tuple[int, int]], times: int = 1) -> None:
        """These kinds and halves, so many times."""
        self._steps += list(actions) * times
        for action in actions:
            self._done[action] += max(0, times)

    def rows(self) -> Ints:
        """[action] kind, half and micro-batch."""
        steps = np.array(self._steps, np.int64).reshape(-1, 2)
        microbatches = np.zeros(len(steps), np.int64)
        for (kind, half), count in self._done.items():
            microbatches[(steps[:, 0] == kind) & (steps[:, 1] == half)] = np.arange(count)
        return np.column_stack([steps, microbatches])


class _Order:
    """A rank's actions while they are made: each takes the next micro-batch of its kind and half."""

    def __init__(self) -> None:
        self.rows: _Rows = []
        self.waiting: list[tuple[int, int]] = []
        """half and micro-batch of weight gradients that are due, the oldest first"""
        self._next: dict[tuple[int, int], int] = {}

    def done(self, kind: int, half: int) -> int:
        """How many of these there are; a B counts as I and W."""
        return self._next.get((kind, half), 0)

    def add(self, actions: Sequence[tuple[int, int | None]], times: int = 1) -> None:
        """These kinds and halves, so many times; a W without a half is the oldest that is due, if any is."""
        for kind, half in list(actions) * times:
            if half is None:
                if self.waiting:
                    self._append(kind, *self.waiting[0])
                continue
            self._append(kind, half, self._next.get((_I if kind == _B else kind, half), 0))

    def _append(self, kind: int, half: int, microbatch: int) -> None:
        self.rows.append((kind, half, microbatch))
        for made in (_I, _W) if kind == _B else (kind,):
            self._next[made, half] = self.done(made, half) + 1
        if kind == _I:
            self.waiting.append((half, microbatch))
        elif kind == _W:
            self.waiting.remove((half, microbatch))


def _without_padding(name: str, made: Sequence[Ints], num_microbatches: int) -> Schedule:
    """The schedule of these halves, without the micro-batches that only filled them up."""
    last = 2 * len(made) - 1
    actions = []
    for rank, rows in enumerate(made):
        own = rows[rows[:, 2] < num_microbatches]
        own[:, 1] = np.where(own[:, 1], last - rank, rank)
        actions.append(own)
    return v_schedule(name, actions, num_microbatches)


def _repeated(
    name: str, num_ranks: int, num_microbatches: int, *, steps: Sequence[int], waits: Sequence[int]
) -> Schedule:
    """One micro-batch's actions, repeated every six units of time, which all six of a rank fill without a gap.

    `steps`: from one rank to the next in F down and up and I down and up; `waits`: from F down to F up, from there
    to I, and from I at the last rank to I back up. With them no two actions of a rank fall into one of its six
    places, of which the weight gradients take the two that are left. How long activations live decides the memory:
    six units are one micro-batch of a stage.
    """
    require_sizes(num_ranks, num_microbatches)
    ranks = np.arange(num_ranks, dtype=np.int64)
    down = steps[0] * ranks
    up = down[-1] + waits[0] + steps[1] * ranks[::-1]
    back_down = up[0] + waits[1] + steps[2] * ranks
    back_up = back_down[-1] + waits[2] + steps[3] * ranks[::-1]
    lanes, microbatches = [], np.arange(num_microbatches, dtype=np.int64)
    for rank, times in enumerate(np.stack([down, up, back_down, back_up], axis=1).tolist()):
        last = 2 * num_ranks - 1 - rank
        times += _weight_places(times)
        starts = (np.array(times, dtype=np.int64)[:, None] + 6 * microbatches).ravel()
        order = np.argsort(starts, kind="stable")
        kinds = np.repeat([_F, _F, _I, _I, _W, _W], num_microbatches)[order]
        stages = np.repeat([rank, last, last, rank, last, rank], num_microbatches)[order]
        lanes.append(Lane(rank, kinds, stages, np.tile(microbatches, 6)[order]))
    return Schedule(
        name=name,
        num_stages=2 * num_ranks,
        num_microbatches=num_microbatches,
        placement=v_placement(num_ranks),
        lanes=tuple(lanes),
    )


def _weight_places(times: Sequence[int]) -> list[int]:
    """When W of the way up and of the way down begin: in the two free places of six, the sooner the better."""
    taken = {time % 6 for time in times}
    assert len(taken) == 4, "two actions fall into one place"
    one, other = (place for place in range(6) if place not in taken)
    ways = [
        [after + 1 + (place - after - 1) % 6 for after, place in zip(times[2:], places, strict=True)]
        for places in ((one, other), (other, one))
    ]
    return min(ways, key=sum)
