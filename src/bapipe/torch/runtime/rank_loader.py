"""A DataLoader for one rank: it loads the micro-batches that this rank's stages take, and nothing elsewhere.

    rank 0   stage 0            inputs of all micro-batches
    rank 1   stage 1            nothing: the dataset is not touched
    rank 2   stage 2, replica   inputs that it takes, and targets, of its own micro-batches
    rank 3   stage 2, replica   the same of the others

Each sample is loaded with random numbers seeded by the epoch and its number, and each micro-batch is collated by
itself, seeded by its samples: ranks that load the same ones, and a resumed run, get the same from a dataset that
draws, however many workers there are.
"""

from __future__ import annotations

import bisect
import contextlib
import hashlib
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from bapipe.errors import BaPipeError
from bapipe.torch.runtime.batch_layout import filled
from bapipe.torch.runtime.rank_batches import RankBatch, RankNeeds

__all__ = ["LoaderOptions", "MapDataset", "RankLoader"]

_NUMPY_SEEDS = 2**32
_Chosen = tuple[tuple[int, ...], int | None]
"""the samples of a global batch, and the length that their sequences are padded to"""


class MapDataset(Protocol):
    """What a loader takes: samples by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderOptions:
    """How a dataset is gone through."""

    shuffle: bool = False
    """whether every epoch has another order"""
    seed: int = 0
    """of that order, and of what the dataset and collate_fn draw"""
    drop_last: bool = False
    """whether the samples at the end that make no whole global batch are left out"""
    collate_fn: Callable[..., Any] | None = None
    """makes a batch of samples; None: torch's. With `lengths` it is given the length to pad to, too"""
    lengths: Sequence[int] | None = None
    """positions of every sample's sequence; None: all are alike"""
    buckets: tuple[int, ...] = ()
    """lengths that sequences are padded to, from the shortest; with `lengths`"""

    def __post_init__(self) -> None:
        if self.lengths is None:
            return
        longest = max(self.lengths, default=0)
        if not self.buckets or longest > self.buckets[-1]:
            known = ", ".join(map(str, self.buckets)) or "no"
            raise BaPipeError(
                f"the longest sequence has {longest} positions, the pipeline was made for {known}; make it with a "
                "longer one in lengths, or cut sequences"
            )
        if self.collate_fn is None:
            raise BaPipeError(
                "lengths without collate_fn; give collate_fn(samples, length), which pads to the length"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class _MicroBatchLoad:
    """One micro-batch to load."""

    indices: tuple[int, ...]
    epoch: int
    length: int | None
    """that sequences are padded to"""


class RankLoader:
    """Goes through a dataset, epoch after epoch; every rank makes one with the same options.

    Iterating gives the batches of one epoch, or those that are left of it after `load_state_dict`, and then stands
    at the next. `len` is of a whole epoch.
    """

    def __init__(
        self,
        dataset: MapDataset,
        needs: RankNeeds,
        planned: Sequence[int],
        options: LoaderOptions,
        *,
        paired: bool,
        **loader: Any,
    ) -> None:
        """`planned` are the samples of a global batch's micro-batches. `paired`: a collated batch is (inputs,
        targets), else it is inputs alone. `loader` are options of torch's DataLoader."""
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            raise BaPipeError(
                f"data_loader takes a dataset with a length, got {type(dataset).__name__}; give every rank the "
                "batches of a DataLoader of your own, or None where it needs none"
            )
        given = [name for name in ("batch_size", "sampler", "batch_sampler", "generator") if name in loader]
        if given:
            raise BaPipeError(f"{given[0]} is the plan's, got it for data_loader; leave it out")
        self._samples = len(dataset)
        if options.lengths is not None and len(options.lengths) != self._samples:
            raise BaPipeError(
                f"the dataset has {self._samples} samples, lengths are of {len(options.lengths)}; give one of each"
            )
        self._planned, self._needs, self._options = tuple(planned), needs, options
        self._known: tuple[int, list[_Chosen]] | None = None
        """an epoch and its batches"""
        self.epoch = 0
        """that the next batch is of"""
        self.position = 0
        """batches of it that were taken"""
        if len(self) == 0:
            raise BaPipeError(
                f"the dataset has {self._samples} samples, fewer than a global batch of {sum(planned)}; give "
                "more, or drop_last=False"
            )
        source = _MicroBatchSource(
            dataset, options.collate_fn or default_collate, paired=paired, seed=options.seed
        )
        self._works = _Works()
        self._loader: DataLoader[Any] = DataLoader(
            source,
            batch_size=None,
            sampler=self._works,
            collate_fn=_as_it_is,
            generator=torch.Generator().manual_seed(options.seed),  # workers' seeds; torch's stays as it is
            **loader,
        )

    def __len__(self) -> int:
        """Batches of an epoch."""
        return len(self._batches(self.epoch))

    def set_epoch(self, epoch: int) -> None:
        """Begin that epoch; without it each follows the last."""
        self.epoch, self.position = epoch, 0

    def state_dict(self) -> dict[str, int]:
        """Where in the data it stands: after the batch that was yielded last. The same on every rank."""
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from there; also under another plan, if its global batch is the same."""
        self.epoch, self.position = int(state["epoch"]), int(state["position"])

    def __iter__(self) -> Iterator[RankBatch]:
        epoch = self.epoch
        numbers = range(self.position, len(self))
        self._works.wanted = lambda: (
            work for number in numbers for work in self._batch(epoch, number)[1].values()
        )
        loads = any(self._batch(epoch, number)[1] for number in numbers)
        loaded: Iterator[tuple[Any, Any]] = iter(self._loader) if loads else iter(())
        for batch in numbers:
            samples, works = self._batch(epoch, batch)
            parts: dict[int, tuple[Any, Any]] = {}
            for number in works:
                inputs, targets = next(loaded)
                wants = self._needs.of_microbatch(number)
                parts[number] = (inputs if wants[0] else None, targets if wants[1] else None)
            self.position += 1
            if self.position == len(self):
                self.epoch, self.position = epoch + 1, 0
            yield RankBatch(samples=samples, parts=parts)

    def _batch(self, epoch: int, number: int) -> tuple[int, dict[int, _MicroBatchLoad]]:
        """Samples of a global batch, and what of it this rank loads."""
        indices, length = self._batches(epoch)[number]
        works, start = {}, 0
        for microbatch, count in enumerate(filled(self._planned, len(indices))):
            own = tuple(indices[start : start + count])
            start += count
            if any(self._needs.of_microbatch(microbatch)):
                works[microbatch] = _MicroBatchLoad(indices=own, epoch=epoch, length=length)
        return len(indices), works

    def _batches(self, epoch: int) -> list[_Chosen]:
        """The global batches of an epoch, in order."""
        if self._known is None or self._known[0] != epoch:
            self._known = epoch, _epoch_batches(self._samples, sum(self._planned), self._options, epoch)
        return self._known[1]


def _epoch_batches(samples: int, size: int, options: LoaderOptions, epoch: int) -> list[_Chosen]:
    """Samples, in the order of the epoch, in global batches; with `lengths` those of one bucket each."""
    generator = torch.Generator().manual_seed(options.seed + epoch)
    order = torch.randperm(samples, generator=generator).tolist() if options.shuffle else list(range(samples))
    buckets: dict[int | None, list[int]] = {}
    for index in order:
        bucket = None
        if options.lengths is not None:
            bucket = options.buckets[bisect.bisect_left(options.buckets, options.lengths[index])]
        buckets.setdefault(bucket, []).append(index)
    batches = [
        (tuple(indices[start : start + size]), length)
        for length, indices in sorted(buckets.items(), key=lambda item: item[0] or 0)
        for start in range(0, len(indices), size)
        if not options.drop_last or start + size <= len(indices)
    ]
    if options.shuffle and options.lengths is not None:
        batches = [batches[place] for place in torch.randperm(len(batches), generator=generator).tolist()]
    return batches


class _Works(torch.utils.data.Sampler[_MicroBatchLoad]):
    """The micro-batches to load, for the DataLoader to hand to its workers."""

    def __init__(self) -> None:
        self.wanted: Callable[[], Iterator[_MicroBatchLoad]] = lambda: iter(())

    def __iter__(self) -> Iterator[_MicroBatchLoad]:
        return self.wanted()


class _MicroBatchSource(Dataset[Any]):
    """A dataset of micro-batches: what a worker has."""

    def __init__(self, dataset: MapDataset, collate: Callable[..., Any], *, paired: bool, seed: int) -> None:
        self._dataset, self._collate, self._paired, self._seed = dataset, collate, paired, seed

    def __getitem__(self, work: _MicroBatchLoad) -> tuple[Any, Any]:
        with _preserved():
            samples = self._samples(work)
            _seed_all(self._seed, work.epoch, *work.indices)
            batch = self._collate(samples) if work.length is None else self._collate(samples, work.length)
        if not self._paired:
            return batch, None
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            raise BaPipeError(
                f"with a loss function a batch is (inputs, targets), got {_described(batch)}; return both from "
                "the dataset, or from collate_fn"
            )
        return batch[0], batch[1]

    def _samples(self, work: _MicroBatchLoad) -> list[Any]:
        several = getattr(self._dataset, "__getitems__", None)
        if several is not None:
            _seed_all(self._seed, work.epoch, *work.indices)
            return list(several(list(work.indices)))
        samples = []
        for index in work.indices:
            _seed_all(self._seed, work.epoch, index)
            samples.append(self._dataset[index])
        return samples


def _described(batch: Any) -> str:
    count = f" of {len(batch)}" if isinstance(batch, (tuple, list, Mapping)) else ""
    return f"{type(batch).__name__}{count}"


def _as_it_is(batch: Any) -> Any:
    return batch


def _seed_all(*numbers: int) -> None:
    """Seed the generators of torch, Python and numpy by these numbers, the same in every process."""
    digest = hashlib.blake2b(repr(numbers).encode("ascii"), digest_size=8).digest()
    seed = int.from_bytes(digest, "little")
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % _NUMPY_SEEDS)


@contextlib.contextmanager
def _preserved() -> Iterator[None]:
    """Leave the generators of torch, Python and numpy as they were."""
    numpy = sys.modules.get("numpy")
    python_state = random.getstate()
    numpy_state = None if numpy is None else numpy.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(python_state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)
