"""Layers under autocast, measured as a run has them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from bapipe.torch.device.precision_modes import MixedForward
from bapipe.torch.device.tensor_internals import casts_within

__all__ = ["MixedLayers"]

T = TypeVar("T")


class MixedLayers:
    """Layers under autocast as a run has them: each weight is cast once, and the cast is used from then on."""

    def __init__(self, mixed: MixedForward) -> None:
        self.region = mixed
        self._bytes: dict[int, int] = {}
        """id of a parameter -> bytes of its cast, 0 where it is not cast"""
        self._places: dict[int, int] = {}
        """id of a parameter -> address of the cast that is kept"""

    @property
    def addresses(self) -> set[int]:
        """Where the casts are that are kept."""
        return set(self._places.values())

    @property
    def total(self) -> int:
        """Bytes of all casts that are kept."""
        return sum(self._bytes[key] for key in self._places)

    def knows(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Whether it is noted of each of the parameters what is cast of it, and that is kept."""
        return all(not self._bytes.get(id(item), 1) or id(item) in self._places for item in parameters)

    def cast_bytes(self, parameters: Sequence[nn.Parameter]) -> float:
        """Of the casts of these parameters."""
        return float(sum(self._bytes.get(id(item), 0) for item in parameters))

    def cast(self, parameters: Sequence[nn.Parameter]) -> None:
        """Cast those of the parameters that forwards cast, as the first forward of a global batch does."""
        for item in parameters:
            if self._bytes.get(id(item)):
                item.detach().to(self.region.dtype)

    def forget(self, parameters: Sequence[nn.Parameter]) -> None:
        """Let go of all casts, and of what is known of these parameters, which are no longer used."""
        torch.clear_autocast_cache()
        self._places.clear()
        for item in parameters:
            self._bytes.pop(id(item), None)

    def under(self, run: Callable[..., T]) -> Callable[..., T]:
        """The same under autocast."""

        def call(*values: Any) -> T:
            with self.region.forward(keep=torch.is_grad_enabled()):
                return run(*values)

        return call

    def noted(self, run: Callable[..., T], parameters: Sequence[nn.Parameter], values: Sequence[Any]) -> T:
        """What is made of the values; what is cast of the parameters for it is noted, and kept with its graph."""
        with torch.enable_grad():
            made, casts = casts_within(lambda: run(*values), parameters, self.region.dtype)
        self._bytes = dict.fromkeys(map(id, parameters), 0) | self._bytes
        for key, (address, size) in casts.items():
            self._places[key], self._bytes[key] = address, size
        return made
