"""The largest that fits: micro-batch, sequence or depth on every rung of a ladder of ways to save memory.

A rung is a request with some of the ways allowed; each is planned as `bapipe plan` would, so that what fits, and
how fast it is there, are the planner's answers. A new rung is a row of `LADDER`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from bapipe.costs.profile import Profile
from bapipe.errors import BaPipeError, InfeasibleError
from bapipe.hardware.cluster import Cluster
from bapipe.planner import Request, explore
from bapipe.planner.evaluate import Evaluation

__all__ = ["LADDER", "LargestFit", "Quantity", "Rung", "RungFit", "SizeRange", "climb_ladder"]

Quantity = Literal["batch", "sequence", "depth"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """One way to train, or several that the planner chooses among."""

    name: str
    forces: tuple[tuple[str, object], ...]
    """fields of the request and what they are"""

    def of(self, request: Request) -> Request:
        """The request on this rung."""
        return replace(request, **dict(self.forces))  # type: ignore[arg-type]


_DATA = (("schedule", "data-parallel"), ("zero_stage", "0"))
LADDER: tuple[Rung, ...] = (
    Rung(name="data parallelism", forces=(*_DATA, ("recompute", "never"))),
    Rung(name="and layers recompute", forces=(*_DATA, ("recompute", "layers"))),
    Rung(name="and ZeRO-1", forces=(_DATA[0], ("zero_stage", "1"), ("recompute", "layers"))),
    Rung(name="FSDP2 of torch", forces=(("strategy", "fsdp"),)),
    Rung(name="pipeline stages", forces=(("recompute", "never"),)),
    Rung(name="and whole stages recompute", forces=(("recompute", "stages"),)),
    Rung(name="and layers recompute, as each needs", forces=(("recompute", "auto"),)),
)
"""from the simplest on; every rung allows what those before it of its kind do"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeRange:
    """The sizes that may be asked for."""

    least: int
    step: int
    """sizes are the least and multiples of this beyond it; 0: its powers of two times the least"""
    most: int
    """what the model or the profile allows"""

    def size(self, place: int) -> int:
        return self.least * 2**place if self.step == 0 else self.least + place * self.step

    @property
    def count(self) -> int:
        """How many sizes there are."""
        if self.step:
            return (self.most - self.least) // self.step + 1
        return max(1, (self.most // self.least).bit_length())


@dataclass(frozen=True, slots=True, kw_only=True)
class RungFit:
    """What a rung reaches."""

    name: str
    largest: int | None
    """None: not even the least size fits"""
    at_most: bool
    """whether that is the largest that may be asked for, so that more may fit"""
    throughput: float | None
    """samples/s there"""
    plan: str
    """how it is trained there; or what is short at the least size"""
    asked: float | None
    """samples/s at the size that was asked for; None: it does not fit"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestFit:
    """The ladder of one model on one cluster."""

    quantity: Quantity
    asked: int
    """the size that all rungs are compared at"""
    rungs: tuple[RungFit, ...]


def climb_ladder(
    profile_at: Callable[[int], Profile],
    request_at: Callable[[int], Request],
    cluster: Cluster,
    sizes: SizeRange,
    *,
    quantity: Quantity,
    asked: int,
    ladder: Sequence[Rung] = LADDER,
    progress: Callable[[str], None] | None = None,
) -> LargestFit:
    """The largest size that each rung has a plan for, and its samples/s there and at the size `asked`.

    Where a size fits, smaller ones are taken to. Cost: some ten plans a rung.
    """
    profiles: dict[int, Profile] = {}
    found: list[RungFit] = []

    def answer(rung: Rung, size: int) -> Evaluation | str:
        if progress is not None:
            progress(f"{rung.name}, {quantity} {size}")
        if size not in profiles:
            profiles[size] = profile_at(size)
        try:
            return explore(profiles[size], cluster, rung.of(request_at(size))).best
        except InfeasibleError as error:
            return str(error)
        except BaPipeError as error:
            if rung is ladder[0]:
                raise  # nothing of this rung alone is wrong
            return str(error)

    for rung in ladder:
        known: dict[int, Evaluation | str] = {}

        def fits(place: int, rung: Rung = rung, known: dict[int, Evaluation | str] = known) -> bool:
            size = sizes.size(place)
            if size not in known:
                known[size] = answer(rung, size)
            return not isinstance(known[size], str)

        last = _last_fitting(fits, sizes.count)
        if asked not in known:
            known[asked] = answer(rung, asked)
        own = known[asked]
        largest = None if last is None else sizes.size(last)
        best = known[sizes.size(0) if largest is None else largest]
        found.append(
            RungFit(
                name=rung.name,
                largest=largest,
                at_most=last == sizes.count - 1,
                throughput=None if isinstance(best, str) else best.throughput,
                plan=best if isinstance(best, str) else _plan(best),
                asked=None if isinstance(own, str) else own.throughput,
            )
        )
    return LargestFit(quantity=quantity, asked=asked, rungs=tuple(found))


def _plan(best: Evaluation) -> str:
    return f"{best.candidate.label}, micro-batch {best.candidate.chain.microbatch}"


def _last_fitting(fits: Callable[[int], bool], count: int) -> int | None:
    """The last place of 0 to `count` - 1 that fits, by doubling and then halving; None where 0 does not."""
    if count < 1:
        raise BaPipeError("there is no size to try; profile more micro-batch sizes")
    if not fits(0):
        return None
    low, high = 0, 1
    while high < count and fits(high):
        low, high = high, 2 * high
    high = min(high, count)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
