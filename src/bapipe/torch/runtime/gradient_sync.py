"""Sums of gradients between ranks: among the replicas of a stage, and among all that hold a tied weight."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bapipe.torch.comm import guarded
from bapipe.torch.comm.collectives import BUCKET_BYTES

__all__ = ["Exchange", "MakeSums", "Reducer", "TiedWeights", "make_sums"]


class Reducer:
    """Sums a stage's gradients over its replicas, in buckets and while the last backward still runs.

    Buckets are filled from the last parameter to the first, as a backward reaches them, and go out in that order
    on every replica. The losses are weighted by their share of the global batch, so the sum needs no division.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
        self._group = group
        self._buckets = _buckets([item for item in reversed(parameters) if item.requires_grad])
        self._place = {id(item): index for index, bucket in enumerate(self._buckets) for item in bucket}
        self._missing: list[int] = []
        self._under_way: list[Exchange | None] = []
        self._listening = False
        self._in_parts: set[int] = set()
        # torch keeps a hook where Python's collector does not look, so it must not keep the parameters in turn.
        ready = weakref.WeakMethod(self._ready)

        def hook(parameter: Tensor) -> None:
            alive = ready()
            if alive is not None:
                alive(parameter)

        for bucket in self._buckets:
            for parameter in bucket:
                parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def hold_back(self, parameters: Iterable[nn.Parameter]) -> None:
        """Gradients of these come in several parts, so that no bucket with one goes out before all are there."""
        self._in_parts |= {id(item) for item in parameters}

    def start(self) -> None:
        """The last gradients are about to be made: send each bucket as it fills."""
        self._missing = [len(bucket) for bucket in self._buckets]
        self._listening = True

    def _ready(self, parameter: Tensor) -> None:
        if not self._listening or id(parameter) in self._in_parts:
            return
        self._missing[self._place[id(parameter)]] -= 1
        while len(self._under_way) < len(self._buckets) and self._missing[len(self._under_way)] == 0:
            self._send(len(self._under_way))

    def _send(self, index: int) -> None:
        bucket = self._buckets[index]
        before = self._under_way[-1] if self._under_way else None
        if before is not None:
            before.wait_until_made()
        given = [item.grad is not None for item in bucket]
        self._under_way.append(self._begin(index, given))

    def _begin(self, index: int, given: Sequence[bool]) -> Exchange:
        """Start to sum a bucket, of which this rank has these gradients."""
        bucket = self._buckets[index]
        # Numbers from the host would have to wait for all that is queued on the device.
        present = bucket[0].new_ones(len(bucket)) if all(given) else bucket[0].new_tensor([*map(float, given)])
        return _Sum(bucket, self._group, present, all_given=all(given), replaces=True)

    def finish(self) -> None:
        """Send what no gradient came for as zeros, wait, and leave the sums in `.grad`.

        A weight without a gradient on any replica has none afterwards, as in one process: an optimizer leaves it.
        """
        self._listening = False
        for index in range(len(self._under_way), len(self._buckets)):
            self._send(index)
        for index, item in enumerate(self._under_way):
            assert item is not None
            self._take(index, item)
        self._under_way.clear()

    def _take(self, index: int, item: Exchange) -> None:
        """Leave the sums of a bucket in `.grad`."""
        *parts, counts = item.wait()
        # Where this rank had all of them the counts need not be asked for, which would wait for the device.
        found = [1.0] * len(parts) if item.all_given else counts.tolist()
        for parameter, part, count in zip(self._buckets[index], parts, found, strict=True):
            if count:
                _put(parameter, part)


def _buckets(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    buckets: list[list[nn.Parameter]] = []
    filled, dtype = 0, None
    for parameter in parameters:
        size = parameter.numel() * parameter.element_size()
        if not buckets or filled + size > BUCKET_BYTES or parameter.dtype != dtype:
            buckets.append([])
            filled, dtype = 0, parameter.dtype
        buckets[-1].append(parameter)
        filled += size
    return buckets


def _gradient(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _put(parameter: nn.Parameter, part: Tensor) -> None:
    """A sum into the parameter's gradient, which may be the sum already."""
    gradient = _gradient(parameter)
    if gradient.data_ptr() != part.data_ptr():
        gradient.copy_(part.view_as(gradient))
    parameter.grad = gradient


class Exchange(ABC):
    """Gradients that are on their way between ranks."""

    def __init__(self, flat: Tensor, group: dist.ProcessGroup, *, all_given: bool) -> None:
        """`flat` are those of this rank, one after another."""
        self.all_given = all_given
        """whether this rank has a gradient of every one"""
        self._flat = flat
        self._made: torch.cuda.Event | None = None
        if flat.is_cuda and dist.get_backend(group) == "gloo":
            self._made = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._made.record()
        self._works: list[dist.Work] = []

    def wait_until_made(self) -> None:
        """Until the device has the gradients themselves, not their sums.

        A host that runs further ahead would queue copies that wait for the end of the backward, and behind them,
        where streams share a queue of the device, those that need not.
        """
        if self._made is not None:
            self._made.synchronize()

    def wait(self) -> tuple[Tensor, ...]:
        """The sums, one after another, and what was given besides."""
        with guarded(None):
            for work in self._works:
                work.wait()
        return self._sums()

    @abstractmethod
    def _sums(self) -> tuple[Tensor, ...]:
        """What `wait` returns, once it is there."""


class _Sum(Exchange):
    """Gradients that are being summed, missing ones as zeros, and what is given besides.

    They go in pieces of a bucket, all under way at once: gloo copies one to or from the GPU while it sums another.
    NCCL sums on the device, and a wait for it lets the device wait, not the host.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        group: dist.ProcessGroup,
        *besides: Tensor,
        all_given: bool = False,
        replaces: bool = False,
    ) -> None:
        """`replaces`: the parameters' gradients are what is summed from now on, so that none is there twice."""
        self.parameters = parameters
        parts = [*(_gradient(item).reshape(-1) for item in parameters), *besides]
        self._sizes = [part.numel() for part in parts]
        super().__init__(torch.cat(parts), group, all_given=all_given)
        del parts
        if replaces:
            for parameter, part in zip(parameters, torch.split(self._flat, self._sizes), strict=False):
                if parameter.grad is not None and parameter.is_contiguous():
                    parameter.grad = part.view_as(parameter)
        with guarded(None):
            for piece in torch.split(self._flat, BUCKET_BYTES // self._flat.element_size()):
                work = dist.all_reduce(piece, group=group, async_op=True)
                assert work is not None
                self._works.append(work)

    def _sums(self) -> tuple[Tensor, ...]:
        return torch.split(self._flat, self._sizes)


class TiedWeights:
    """Sums the gradients of weights that several stages hold, so that all their copies take the same optimizer
    step.

    Each rank begins when its own are complete, while others still run; one sum is for all weights that the same
    ranks hold.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], groups: Mapping[str, dist.ProcessGroup]) -> None:
        """By name, the same on every rank that holds them; `parameters` are this rank's."""
        self._tied: dict[tuple[dist.ProcessGroup, torch.dtype], list[nn.Parameter]] = {}
        for name in sorted(groups):
            parameter = parameters.get(name)
            if parameter is not None and parameter.requires_grad:
                self._tied.setdefault((groups[name], parameter.dtype), []).append(parameter)
        self._under_way: list[_Sum] = []

    def start(self) -> None:
        """This rank's gradients are complete, or will be when what it has queued is done."""
        for (group, _), parameters in self._tied.items():
            self._under_way.append(_Sum(parameters, group))

    def finish(self) -> None:
        """Wait, and leave the sums in `.grad`."""
        for item in self._under_way:
            for parameter, part in zip(item.parameters, item.wait(), strict=True):
                _put(parameter, part)
        self._under_way.clear()


def make_sums(
    placement: Sequence[Sequence[int]],
    users: Mapping[str, tuple[int, ...]],
    own: Mapping[int, Mapping[str, nn.Parameter]],
    new_group: Callable[[Sequence[int]], dist.ProcessGroup],
    kind: type[Reducer] = Reducer,
) -> tuple[dict[int, Reducer], TiedWeights]:
    """Who sums what with whom, by stage and for tied weights. Every rank makes all groups, in the same order.

    `placement` has the ranks of each stage, `users` the stages that hold each parameter, `own` the parameters of
    this rank's stages; `new_group` makes a process group of some ranks, and every rank calls it. `kind` sums the
    gradients of a stage's replicas.
    """
    ranks = {
        name: tuple(sorted({rank for stage in stages for rank in placement[stage]}))
        for name, stages in users.items()
    }
    tied = {name for name, stages in users.items() if len(stages) > 1 and len(ranks[name]) > 1}
    shared = {tuple(sorted(item)) for item in placement if len(item) > 1} | {ranks[name] for name in tied}
    groups = {members: new_group(members) for members in sorted(shared)}
    reducers = {}
    for stage, parameters in own.items():
        if len(placement[stage]) > 1:
            summed = [item for name, item in parameters.items() if name not in tied]
            reducers[stage] = kind(summed, groups[tuple(sorted(placement[stage]))])
    held = {name: item for parameters in own.values() for name, item in parameters.items()}
    return reducers, TiedWeights(held, {name: groups[ranks[name]] for name in tied})


MakeSums = Callable[
    [
        Sequence[Sequence[int]],
        Mapping[str, tuple[int, ...]],
        Mapping[int, Mapping[str, nn.Parameter]],
        Callable[[Sequence[int]], dist.ProcessGroup],
    ],
    tuple[dict[int, Reducer], TiedWeights],
]
"""`make_sums`, or what another kind of training has in its place"""
