"""What autograd saves in a forward, in slots that can be emptied one by one.

A graph that is kept for a second backward keeps all that it saved. Weight gradients need only a part of it: the
input of a product, but neither the softmax of attention nor what a recurrent layer keeps for its input gradient.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager

import torch
from torch import Tensor

__all__ = ["SavedValues"]


class _Uses:
    """How often backwards have asked for each value, and how often they still will before it can go."""

    __slots__ = ("asked", "left")

    def __init__(self) -> None:
        self.asked: Counter[int] = Counter()
        self.left: dict[int, int] = {}


class _Slot:
    """One saved value, its number, and where to note that a backward has asked for it."""

    __slots__ = ("__weakref__", "number", "uses", "value")

    def __init__(self, value: Tensor, number: int, uses: _Uses) -> None:
        self.value: Tensor | None = value
        self.number = number
        self.uses = uses


class SavedValues:
    """The values of one micro-batch, numbered as they were saved.

    The graph alone holds the slots: a backward that needs it no more lets go of each as it has used it.
    """

    __slots__ = ("_slots", "_uses")

    def __init__(self) -> None:
        self._slots: list[weakref.ref[_Slot]] = []
        self._uses = _Uses()

    def __len__(self) -> int:
        return len(self._slots)

    def watching(self) -> AbstractContextManager[None]:
        """What is saved within goes into slots."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)

    def _pack(self, value: Tensor) -> _Slot:
        # Detached: what it was saved from may change its contents, or hold the graph.
        slot = _Slot(value.detach(), len(self._slots), self._uses)
        self._slots.append(weakref.ref(slot))
        return slot

    def used_by(self, work: Callable[[], None]) -> frozenset[int]:
        """The numbers of the values that the work asks for."""
        self._uses.asked.clear()
        work()
        return frozenset(self._uses.asked)

    def asked(self) -> dict[int, int]:
        """How often each value has been asked for so far."""
        return dict(self._uses.asked)

    def let_go_after(self, uses: Mapping[int, int]) -> None:
        """Let go of each of these values when it has been asked for so many times: a graph that is kept would hold
        it until its backward has ended."""
        self._uses.left = dict(uses)

    def keep_only(self, numbers: Collection[int]) -> None:
        """Let go of all others; a backward that asks for one of them fails."""
        for slot in self._there():
            if slot.number not in numbers:
                slot.value = None

    def values(self) -> dict[int, Tensor]:
        """Those that are still there, by their numbers."""
        return {slot.number: slot.value for slot in self._there() if slot.value is not None}

    def _there(self) -> Iterator[_Slot]:
        return (slot for reference in self._slots if (slot := reference()) is not None)


def _unpack(slot: _Slot) -> Tensor:
    if slot.value is None:
        raise RuntimeError("a value was let go that this backward needs: its graph is not the one known before")
    value, number, uses = slot.value, slot.number, slot.uses
    uses.asked[number] += 1
    left = uses.left.get(number)
    if left is not None:
        uses.left[number] = left - 1
        if left <= 1:
            slot.value = None
    return value
