"""The one representation of a schedule: ordered actions on lanes of ranks.

    rank 0   0F0 0F1 0B0 0F2 0B1 0B2        stage 0, micro-batches 0, 1, 2
    rank 1       1F0 1B0 1F1 1B1 1F2 1B2    stage 1

A rank runs the actions of one lane strictly in order. Most ranks have one lane; FBP has two, because an FPGA
runs forward and backward at once. Transfers are not actions: they follow from the order (see
`bapipe.simulator.simulate`).
"""

from __future__ import annotations

import enum
import functools
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from bapipe.errors import ScheduleError
from bapipe.schedule.dealing import Dealing, dealt_counts, most_in_a_row, replica_taking, round_length, takers

__all__ = ["Action", "Concurrency", "Kind", "Lane", "Schedule", "Sending"]

IntArray = NDArray[np.int64]
Sending = Literal["after-compute", "cut-through"]
Concurrency = Literal["none", "slots", "static"]


class Kind(enum.IntEnum):
    """What an action does. The letters are torch's, with R, A and U added."""

    F = 0
    """forward"""
    B = 1
    """full backward"""
    I = 2  # noqa: E741
    """gradient of the input only"""
    W = 3
    """gradient of the weights only"""
    R = 4
    """recompute the forward before a backward"""
    A = 5
    """all-reduce of the stage's gradients among its replicas"""
    U = 6
    """optimizer step of the stage's weights"""


_ACTION = re.compile(r"(\d{1,7})([FBIWR])(\d{1,9})|(\d{1,7})([AU])")


@dataclass(frozen=True, slots=True)
class Action:
    """One action, printed as torch prints it: `2F0` is stage 2, forward, micro-batch 0."""

    stage: int
    """the (virtual) stage, from 0"""
    kind: Kind
    microbatch: int | None = None
    """the micro-batch, from 0; None for A and U, which concern the whole global batch"""

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.name}{'' if self.microbatch is None else self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read `2F0`; the inverse of str()."""
        match = _ACTION.fullmatch(text.strip())
        if not match:
            raise ScheduleError(
                f"an action looks like 2F0 (stage, one of F B I W R, micro-batch) or 2A, 2U; got '{text[:40]}'"
            )
        if match[4] is not None:
            return cls(int(match[4]), Kind[match[5]])
        return cls(int(match[1]), Kind[match[2]], int(match[3]))


@dataclass(frozen=True, eq=False, slots=True)
class Lane:
    """A strictly ordered list of actions of one rank, held as three arrays."""

    rank: int
    kinds: IntArray
    stages: IntArray
    microbatches: IntArray
    """-1 where the action has none"""
    name: str = "compute"

    @classmethod
    def of(cls, rank: int, actions: Iterable[Action], *, name: str = "compute") -> Lane:
        rows = [(a.kind, a.stage, -1 if a.microbatch is None else a.microbatch) for a in actions]
        table = np.array(rows, dtype=np.int64).reshape(-1, 3)
        return cls(rank, table[:, 0].copy(), table[:, 1].copy(), table[:, 2].copy(), name)

    def __len__(self) -> int:
        return len(self.kinds)

    def __getitem__(self, position: int) -> Action:
        microbatch = int(self.microbatches[position])
        kind = Kind(int(self.kinds[position]))
        return Action(int(self.stages[position]), kind, None if microbatch < 0 else microbatch)

    def __iter__(self) -> Iterator[Action]:
        return (self[position] for position in range(len(self)))

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Lane)
            and (self.rank, self.name) == (other.rank, other.name)
            and np.array_equal(self.kinds, other.kinds)
            and np.array_equal(self.stages, other.stages)
            and np.array_equal(self.microbatches, other.microbatches)
        )

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True, eq=True, kw_only=True)
class Schedule:
    """Every rank's ordered actions for one global batch, and what they assume of the hardware."""

    name: str
    num_stages: int
    """(virtual) stages of the pipeline"""
    num_microbatches: int
    placement: tuple[tuple[int, ...], ...]
    """for each stage the ranks of its replicas"""
    lanes: tuple[Lane, ...]
    caps: tuple[int, ...] | None = None
    """K_i: most in-flight micro-batches at stage i, all replicas together; None: unlimited"""
    sending: Sending = "after-compute"
    """when a transfer may start: after the compute that makes it (GPU), or with it (FPGA, cut-through)"""
    concurrency: Concurrency = "none"
    """how F and B that run at once share a rank: in lockstep slots, or a static split of its compute units"""
    weight_versions: tuple[int, ...] | None = None
    """weight versions kept at each stage (PipeDream); None: one"""
    flushes: bool = True
    """False: the pipeline never drains, and time is counted at its steady period (PipeDream)"""
    dealing: tuple[Dealing, ...] | None = None
    """for each stage, which of its replicas take which micro-batches (`bapipe.schedule.dealing`); None: in turn"""

    __hash__ = None  # type: ignore[assignment]

    @functools.cached_property
    def num_ranks(self) -> int:
        return 1 + max(rank for ranks in self.placement for rank in ranks)

    @property
    def num_actions(self) -> int:
        return sum(len(lane) for lane in self.lanes)

    def rank_of(self, stage: int, microbatch: int) -> int:
        """The rank that runs this micro-batch of this stage."""
        ranks = self.placement[stage]
        return ranks[replica_taking(self.dealing_of(stage), len(ranks), microbatch)]

    def dealing_of(self, stage: int) -> Dealing:
        """How its micro-batches are dealt to the stage's replicas."""
        return () if self.dealing is None else self.dealing[stage]

    def ranks_by_microbatch(self, stage: int) -> IntArray:
        """The rank that runs each micro-batch of this stage."""
        ranks = self.placement[stage]
        return np.array(ranks, np.int64)[takers(self.dealing_of(stage), len(ranks), self.num_microbatches)]

    def microbatch_counts(self, stage: int) -> tuple[int, ...]:
        """How many micro-batches each replica of this stage takes."""
        return dealt_counts(self.dealing_of(stage), len(self.placement[stage]), self.num_microbatches)

    def replica_cap(self, stage: int, replica: int) -> int | None:
        """How many in-flight micro-batches a replica may hold, by its place: its share of K; None: any number."""
        if self.caps is None:
            return None
        return most_in_a_row(self.dealing_of(stage), len(self.placement[stage]), replica, self.caps[stage])

    def meetings(self, boundary: int) -> tuple[tuple[int, int], ...]:
        """The ranks before and behind a boundary between which each micro-batch goes, until they repeat."""
        both = self.placement[boundary : boundary + 2]
        if len(both[0]) == len(both[1]) == 1:
            return ((both[0][0], both[1][0]),)
        dealt = [self.dealing_of(stage) for stage in (boundary, boundary + 1)]
        turns = math.lcm(*(round_length(own, len(ranks)) for own, ranks in zip(dealt, both, strict=True)))
        turns = min(turns, self.num_microbatches)
        before, behind = (
            np.array(ranks, np.int64)[takers(own, len(ranks), turns)].tolist()
            for own, ranks in zip(dealt, both, strict=True)
        )
        return tuple(zip(before, behind, strict=True))

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The (virtual) stages that are on this rank."""
        return self._stages_by_rank.get(rank, ())

    @functools.cached_property
    def _stages_by_rank(self) -> dict[int, tuple[int, ...]]:
        found: dict[int, dict[int, None]] = {}
        for stage, ranks in enumerate(self.placement):
            for rank in ranks:
                found.setdefault(rank, {})[stage] = None
        return {rank: tuple(stages) for rank, stages in found.items()}

    def parted_stages(self) -> frozenset[int]:
        """The stages whose backward is done in two parts, I and W."""
        parted = np.zeros(self.num_stages, np.bool_)
        for lane in self.lanes:
            parted[lane.stages[lane.kinds == int(Kind.I)]] = True
        return frozenset(np.flatnonzero(parted).tolist())
