"""What the actions and transfers of a schedule take."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from bapipe.errors import BaPipeError

__all__ = ["Costs", "ReplicaCosts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaCosts:
    """Seconds of one replica of a stage, where they are not alike; the fields mean what they mean in `Costs`."""

    forward: float
    backward: float
    input_gradient: float
    weight_gradient: float
    recompute: float
    update: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What each stage's actions and each boundary's transfers take, per micro-batch."""

    forward: tuple[float, ...]
    """seconds, one per stage"""
    backward: tuple[float, ...]
    send_forward: tuple[float, ...]
    """what crosses from stage i to i+1, one per boundary: seconds, or bytes where the network has rates"""
    send_backward: tuple[float, ...]
    input_gradient: tuple[float, ...]
    weight_gradient: tuple[float, ...]
    recompute: tuple[float, ...]
    all_reduce: tuple[float, ...]
    """seconds per global batch, one per stage"""
    update: tuple[float, ...]
    replicas: tuple[tuple[ReplicaCosts, ...], ...] | None = None
    """for each stage what each of its replicas takes, in place of the above; empty where they are alike, None
    where all are"""
    unanswered: tuple[int, ...] = ()
    """boundaries over which no gradient comes back, because nothing before them is trained: the backward of the
    stage before waits for nothing"""

    @classmethod
    def of(
        cls,
        num_stages: int,
        *,
        forward: float | Sequence[float],
        backward: float | Sequence[float],
        transfer: float | Sequence[float] = 0.0,
        transfer_backward: float | Sequence[float] | None = None,
        weight_gradient: float | Sequence[float] | None = None,
        recompute: float | Sequence[float] | None = None,
        all_reduce: float | Sequence[float] = 0.0,
        update: float | Sequence[float] = 0.0,
    ) -> Costs:
        """Costs from one value for all or one per stage (transfers: per boundary).

        Unless given apart, errors are as large as activations, half of the backward is the weight gradient, and
        recomputing takes as long as the forward.
        """
        forwards = _spread(forward, num_stages, "forward time", "stage", positive=True)
        backwards = _spread(backward, num_stages, "backward time", "stage", positive=True)
        weights = (
            tuple(value / 2 for value in backwards)
            if weight_gradient is None
            else _spread(weight_gradient, num_stages, "weight-gradient time", "stage")
        )
        for total, part in zip(backwards, weights, strict=True):
            if part > total:
                raise BaPipeError(f"the weight gradient takes {part:g} of a backward of {total:g}; lower it")
        back = transfer if transfer_backward is None else transfer_backward
        return cls(
            forward=forwards,
            backward=backwards,
            send_forward=_spread(transfer, num_stages - 1, "transfer time", "link"),
            send_backward=_spread(back, num_stages - 1, "transfer time", "link"),
            input_gradient=tuple(b - w for b, w in zip(backwards, weights, strict=True)),
            weight_gradient=weights,
            recompute=forwards if recompute is None else _spread(recompute, num_stages, "recompute time", "stage"),
            all_reduce=_spread(all_reduce, num_stages, "all-reduce time", "stage"),
            update=_spread(update, num_stages, "update time", "stage"),
        )

    @property
    def num_stages(self) -> int:
        return len(self.forward)

    @property
    def uniform(self) -> bool:
        """Whether all stages and all transfers, both ways, are alike, as the closed forms assume."""
        sends = {*self.send_forward, *self.send_backward}
        return len(set(self.forward)) == len(set(self.backward)) == 1 and len(sends) <= 1

    @property
    def transfer(self) -> float:
        """The longest transfer."""
        return max((*self.send_forward, *self.send_backward), default=0.0)

    def split(self, parts: int) -> Costs:
        """Each stage cut into `parts` equal virtual stages, dealt round-robin as interleaving does.

        Stage c·N + r is part c of rank r; the wrap from the last rank to the first costs the longest transfer.
        """
        wrap_forward, wrap_backward = (
            max(sends, default=0.0) for sends in (self.send_forward, self.send_backward)
        )

        def dealt(values: tuple[float, ...]) -> tuple[float, ...]:
            return tuple(value / parts for value in values) * parts

        def joined(sends: tuple[float, ...], wrap: float) -> tuple[float, ...]:
            return ((*sends, wrap) * parts)[:-1]

        return Costs(
            forward=dealt(self.forward),
            backward=dealt(self.backward),
            send_forward=joined(self.send_forward, wrap_forward),
            send_backward=joined(self.send_backward, wrap_backward),
            input_gradient=dealt(self.input_gradient),
            weight_gradient=dealt(self.weight_gradient),
            recompute=dealt(self.recompute),
            all_reduce=dealt(self.all_reduce),
            update=dealt(self.update),
        )

    def folded(self) -> Costs:
        """Each stage cut in two equal ones, placed in a V: stages r and 2N−1−r are the halves of rank r.

        What crosses between two ranks takes as long on the way up as on the way down; at the turn nothing is sent.
        """

        def halved(values: tuple[float, ...]) -> tuple[float, ...]:
            halves = tuple(value / 2 for value in values)
            return (*halves, *reversed(halves))

        def mirrored(sends: tuple[float, ...]) -> tuple[float, ...]:
            return (*sends, 0.0, *reversed(sends))

        return Costs(
            forward=halved(self.forward),
            backward=halved(self.backward),
            send_forward=mirrored(self.send_forward),
            send_backward=mirrored(self.send_backward),
            input_gradient=halved(self.input_gradient),
            weight_gradient=halved(self.weight_gradient),
            recompute=halved(self.recompute),
            all_reduce=halved(self.all_reduce),
            update=halved(self.update),
        )


def _spread(
    value: float | Sequence[float], count: int, what: str, per: str, *, positive: bool = False
) -> tuple[float, ...]:
    values = [float(value)] * count if isinstance(value, (int, float)) else [float(item) for item in value]
    if len(values) == 1 and count != 1:
        values *= count
    if len(values) != count:
        raise BaPipeError(
            f"{what}: {count} {per}{'s' if count != 1 else ''} need one value or {count}, got {len(values)}"
        )
    for item in values:
        if not math.isfinite(item) or item < 0 or (positive and item == 0):
            bound = "more than 0" if positive else "at least 0"
            raise BaPipeError(f"{what} must be a finite number of {bound}, got {item:g}")
        if item != 0 and not 1e-100 <= item <= 1e100:
            raise BaPipeError(f"{what} must lie between 1e-100 and 1e100, got {item:g}; choose another unit")
    return tuple(values)
