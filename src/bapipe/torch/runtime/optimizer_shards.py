"""ZeRO-1: the replicas of a stage share its optimizer step, each for a part of the weights of its own.

    bucket      | w3 ··· | w2 ··············· | w1 ··· | 0 |     weights in one piece of memory, the last one first
    replicas    |  replica 0  |  replica 1  |  replica 2   |     cut into equal chunks, inside of weights too

In the last backward each bucket's gradients are summed so that a replica gets the sums of its chunk only
(reduce-scatter), while the backward runs on. The optimizer steps shards: the parts of weights that lie in this
rank's chunks. Then every replica sends the others what it has stepped (all-gather).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bapipe.errors import BaPipeError
from bapipe.torch.comm import guarded
from bapipe.torch.comm.collectives import all_gather, reduce_scatter
from bapipe.torch.runtime.gradient_sync import Exchange, Reducer

__all__ = ["OptimizerShards", "Shard", "ShardedReducer"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shard:
    """The part of a weight that this rank steps."""

    parameter: nn.Parameter
    """the elements themselves, in one dimension: what is written there is in the weight"""
    whole: nn.Parameter
    """the weight"""
    start: int
    """the first of the weight's elements, row by row, that it has"""
    stop: int
    """the first after it"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Bucket:
    """Weights whose memory is one tensor, and who has which chunk of it."""

    parameters: tuple[nn.Parameter, ...]
    flat: Tensor
    """the weights, and zeros up to a multiple of the replicas"""
    chunk: int
    """elements of each replica's"""
    pieces: tuple[tuple[tuple[int, int, int], ...], ...]
    """by replica, of each weight in its chunk: its place in `parameters`, its first element and the one after its
    last"""
    shards: tuple[Shard, ...]
    """this rank's, one for each of its pieces"""

    @property
    def counts(self) -> int:
        """Most weights in a chunk."""
        return max(len(own) for own in self.pieces)


def _pieces(sizes: Sequence[int], chunk: int, replicas: int) -> tuple[tuple[tuple[int, int, int], ...], ...]:
    """Where equal chunks of weights that lie one after another fall; a chunk of none has an empty piece of the
    last."""
    found: list[list[tuple[int, int, int]]] = [[] for _ in range(replicas)]
    begin = 0
    for index, size in enumerate(sizes):
        for replica in range(begin // chunk, -(-(begin + size) // chunk)):
            first, last = max(begin, replica * chunk), min(begin + size, (replica + 1) * chunk)
            if last > first:
                found[replica].append((index, first - begin, last - begin))
        begin += size
    return tuple(tuple(own) or ((len(sizes) - 1, sizes[-1], sizes[-1]),) for own in found)


def _make_bucket(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> _Bucket:
    """Move the weights into one piece of memory; they stay the objects that they are."""
    replicas, rank = dist.get_world_size(group), dist.get_rank(group)
    sizes = [item.numel() for item in parameters]
    chunk = max(1, math.ceil(sum(sizes) / replicas))
    flat = parameters[0].new_zeros(chunk * replicas).detach()
    places = torch.split(flat[: sum(sizes)], sizes)
    for parameter, place in zip(parameters, places, strict=True):
        view = place.view(parameter.shape)
        view.copy_(parameter.detach())
        parameter.data = view
    pieces = _pieces(sizes, chunk, replicas)
    shards = tuple(
        Shard(parameter=nn.Parameter(places[index][start:stop]), whole=parameters[index], start=start, stop=stop)
        for index, start, stop in pieces[rank]
    )
    return _Bucket(parameters=tuple(parameters), flat=flat, chunk=chunk, pieces=pieces, shards=shards)


class _ScatteredSum(Exchange):
    """Gradients of a bucket of which this rank gets the sums of its chunk, and how many ranks had one of each."""

    def __init__(self, bucket: _Bucket, group: dist.ProcessGroup, given: Sequence[bool]) -> None:
        flat, counts = bucket.flat, bucket.counts
        some = flat.new_ones(counts)
        parts: list[Tensor] = []
        for own in bucket.pieces:
            filled = 0
            for index, start, stop in own:
                gradient = bucket.parameters[index].grad
                filled += stop - start
                parts.append(
                    flat.new_zeros(stop - start) if gradient is None else gradient.reshape(-1)[start:stop]
                )
            parts.append(flat.new_zeros(bucket.chunk - filled))
            if all(given):
                parts.append(some)
            else:
                there = [float(given[index]) for index, _, _ in own]
                parts.append(flat.new_tensor(there + [0.0] * (counts - len(own))))
        super().__init__(torch.cat(parts), group, all_given=all(given))
        del parts
        for parameter in bucket.parameters:
            parameter.grad = None  # its place is taken by what is on its way
        self._sizes = [bucket.chunk, counts]
        # In place, so that the sums need no memory of their own while all gradients are there.
        self._own = self._flat.view(len(bucket.pieces), -1)[dist.get_rank(group)]
        with guarded(None):
            work = reduce_scatter(self._own, self._flat, group=group, async_op=True)
        assert work is not None
        self._works.append(work)

    def _sums(self) -> tuple[Tensor, ...]:
        return torch.split(self._own, self._sizes)


class ShardedReducer(Reducer):
    """Sums a stage's gradients over its replicas, each of which gets those of its shards.

    After `finish` the sums are in the shards' `.grad`, and the parameters have none.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
        super().__init__(parameters, group)
        strided = next((item for own in self._buckets for item in own if not item.is_contiguous()), None)
        if strided is not None:
            raise BaPipeError(
                f"ZeRO-1 shards weights whose elements lie row by row, and one of shape {tuple(strided.shape)} is "
                "in another memory format; make it contiguous, or plan with --zero-stage 0"
            )
        self.buckets = tuple(_make_bucket(own, group) for own in self._buckets)
        """the weights, in the order in which their gradients are sent"""

    def _begin(self, index: int, given: Sequence[bool]) -> Exchange:
        return _ScatteredSum(self.buckets[index], self._group, given)

    def _take(self, index: int, item: Exchange) -> None:
        sums, counts = (part.clone() for part in item.wait())
        self._under_way[index] = None  # the gradients of all replicas' chunks can go
        shards = self.buckets[index].shards
        found = [1.0] * len(shards) if item.all_given else counts.tolist()
        begin = 0
        for shard, count in zip(shards, found, strict=False):
            size = shard.stop - shard.start
            shard.parameter.grad = sums[begin : begin + size] if count else None
            begin += size

    def share_weights(self) -> None:
        """Every replica gets the shards that the others have stepped. All replicas call it."""
        works = [_gathered(bucket.flat, self._group) for bucket in self.buckets]
        with guarded(None):
            for work in works:
                work.wait()

    def whole_gradients(self) -> dict[int, Tensor]:
        """The sums of all gradients, by id of the weight, gathered from all replicas, which all call it."""
        found: dict[int, Tensor] = {}
        rank = dist.get_rank(self._group)
        for bucket in self.buckets:
            flat = torch.zeros_like(bucket.flat)
            begin = rank * bucket.chunk
            for shard in bucket.shards:
                size = shard.stop - shard.start
                if shard.parameter.grad is not None:
                    flat[begin : begin + size] = shard.parameter.grad
                begin += size
            work = _gathered(flat, self._group)
            with guarded(None):
                work.wait()
            sizes = [item.numel() for item in bucket.parameters]
            parts = torch.split(flat[: sum(sizes)], sizes)
            found |= {id(item): part.view(item.shape) for item, part in zip(bucket.parameters, parts, strict=True)}
        return found


def _gathered(flat: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Begin to fill the other replicas' chunks."""
    chunk = flat.numel() // dist.get_world_size(group)
    own = flat.narrow(0, dist.get_rank(group) * chunk, chunk)
    if dist.get_backend(group) == "gloo":
        own = own.clone()  # it may not read from where it writes
    with guarded(None):
        work = all_gather(flat, own, group=group, async_op=True)
    assert work is not None
    return work


class OptimizerShards:
    """What of a rank's weights its optimizer steps: shards of those that its replicas share, and all others."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], reducers: Mapping[int, Reducer]) -> None:
        """`parameters` are the rank's, by name."""
        self._reducers = [reducers[stage] for stage in sorted(reducers)]
        self._parameters = parameters
        own = [item for reducer in self._sharded for bucket in reducer.buckets for item in bucket.shards]
        self._shard = {id(item.whole): item for item in own}
        self._known = {id(item.parameter): item for item in own}
        self._shared = {
            id(item) for reducer in self._sharded for bucket in reducer.buckets for item in bucket.parameters
        }

    @property
    def _sharded(self) -> list[ShardedReducer]:
        return [item for item in self._reducers if isinstance(item, ShardedReducer)]

    @property
    def any(self) -> bool:
        """Whether any weight of this rank is sharded."""
        return bool(self._shared)

    def shard(self, parameter: Tensor) -> Shard | None:
        """The shard that an optimizer's parameter is; None: it is a weight."""
        return self._known.get(id(parameter))

    def is_shared(self, parameter: Tensor) -> bool:
        """Whether the replicas share the step of this weight."""
        return id(parameter) in self._shared

    def stepped(self, parameters: Iterable[nn.Parameter] | None = None) -> list[nn.Parameter]:
        """In place of weights, by default all of the rank, what this rank steps of them."""
        found = []
        for item in self._parameters.values() if parameters is None else parameters:
            if id(item) not in self._shared:
                found.append(item)
            elif (shard := self._shard.get(id(item))) is not None:
                found.append(shard.parameter)
        return found

    def gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """Of a weight, or what this rank has of it."""
        if id(parameter) not in self._shared:
            return parameter.grad
        shard = self._shard.get(id(parameter))
        return None if shard is None else shard.parameter.grad

    def whole_gradients(self) -> dict[str, Tensor | None]:
        """Every weight's gradient by name, whole; all ranks call it."""
        gathered: dict[int, Tensor] = {}
        for reducer in self._sharded:
            gathered |= reducer.whole_gradients()
        return {name: gathered.get(id(item), item.grad) for name, item in self._parameters.items()}

    def share_weights(self) -> None:
        """After an optimizer step every replica gets what the others have stepped."""
        for reducer in self._sharded:
            reducer.share_weights()

    def translated(self, given: Sequence[Any]) -> list[Any]:
        """Parameters or parameter groups, as an optimizer takes them, with what this rank steps in their place."""
        if any(isinstance(item, dict) for item in given):
            return [{**group, "params": self.stepped(list(group["params"]))} for group in given]
        return list(self.stepped(given))
