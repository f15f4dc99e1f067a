"""What autograd saves in a forward, in slots that can be emptied one by one.

A graph that is kept for a second backward keeps all that it saved. Weight gradients need only a part of it: the
input of a product, but neither the softmax of attention nor what a recurrent layer keeps for its errors.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager

import torch
from torch import Tensor

__all__ = ["SavedValues"]


class _Slot:
    """One saved value, and whether a backward has asked for it."""

    __slots__ = ("used", "value")

    def __init__(self, value: Tensor) -> None:
        self.value: Tensor | None = value
        self.used = False


class SavedValues:
    """The values of one micro-batch, numbered as they were saved."""

    __slots__ = ("_slots",)

    def __init__(self) -> None:
        self._slots: list[_Slot] = []

    def __len__(self) -> int:
        return len(self._slots)

    def watching(self) -> AbstractContextManager[None]:
        """What is saved within goes into slots."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)

    def _pack(self, value: Tensor) -> _Slot:
        slot = _Slot(value.detach())  # what it was saved from may change its contents, or hold the graph
        self._slots.append(slot)
        return slot

    def used_by(self, work: Callable[[], None]) -> frozenset[int]:
        """The numbers of the values that the work asks for."""
        for slot in self._slots:
            slot.used = False
        work()
        return frozenset(number for number, slot in enumerate(self._slots) if slot.used)

    def keep_only(self, numbers: Collection[int]) -> None:
        """Let go of all others; a backward that asks for one of them fails."""
        for number, slot in enumerate(self._slots):
            if number not in numbers:
                slot.value = None

    def values(self, numbers: Collection[int] | None = None) -> list[Tensor]:
        """Those of these numbers that are still there; by default all."""
        chosen = self._slots if numbers is None else [self._slots[number] for number in sorted(numbers)]
        return [slot.value for slot in chosen if slot.value is not None]


def _unpack(slot: _Slot) -> Tensor:
    if slot.value is None:
        raise RuntimeError("a value was let go that this backward needs: its graph is not the one known before")
    slot.used = True
    return slot.value
