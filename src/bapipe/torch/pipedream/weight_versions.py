"""Versions of a stage's weights (PipeDream's weight stashing, in the paper's words).

Micro-batch m runs forward and backward with the weights after max(0, m − lag) optimizer steps; its own goes into
the newest. With a lag of K − 1 that is the newest version when stage i, which holds K micro-batches, starts on m:

    lag 1   F0 F1 B0 U  F2 B1 U  F3 B2 U  …      versions used by F: 0, 0, 1, 2, …
                     1        2        3

Copy on write: the newest version is the parameters themselves. Before an optimizer step that would write into
what a later backward still reads, the parameters get memory of their own, that of the oldest version if it has
just been let go; so a stage has lag + 1 versions and never one more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

from bapipe.torch.profiler.layer_memory import storage_of

__all__ = ["WeightVersions"]


class WeightVersions:
    """The versions of one stage. Micro-batches come and go in order."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], lag: int) -> None:
        """`parameters` are the newest version, which an optimizer changes in place; frozen ones have no other."""
        self._parameters = {name: item for name, item in parameters.items() if item.requires_grad}
        self._lag = lag
        self._count = 0
        """micro-batches of this run"""
        self._newest = 0
        """optimizer steps of this run so far"""
        self._versions: dict[int, dict[str, Tensor]] = {}
        self.peak = 1
        """most versions held at once, the newest included"""

    def begin(self, count: int) -> None:
        """So many micro-batches come, and as many optimizer steps."""
        self._count = count
        self._newest = 0
        self._versions = {0: self._seen()}

    def version_of(self, microbatch: int) -> int:
        """After how many optimizer steps the weights were as this micro-batch sees them."""
        return max(0, microbatch - self._lag)

    def weights(self, microbatch: int) -> Mapping[str, Tensor]:
        """What the micro-batch runs with, by name: leaves of autograd's graph, which get the gradients."""
        return self._versions[self.version_of(microbatch)]

    def forget_gradients(self) -> None:
        """Those of the last optimizer step, before a backward makes others."""
        for parameter in self._parameters.values():
            parameter.grad = None

    def step(self, microbatch: int, apply: Callable[[], None]) -> None:
        """Its backward is done: hand the parameters its gradients, and have `apply` take the optimizer step.

        Gradients stay in the parameters' `.grad` until `forget_gradients`.
        """
        assert microbatch == self._newest, "optimizer steps go in the order of the micro-batches"
        for name, tensor in self.weights(microbatch).items():
            self._parameters[name].grad, tensor.grad = tensor.grad, None
        spare: dict[str, Tensor] | None = None
        for version in [item for item in self._versions if self._last_user(item) <= microbatch]:
            gone = self._versions.pop(version)
            spare = gone if version != self._newest else None
        if self._newest in self._versions:
            self._move(spare)
        apply()
        self._newest += 1
        if self._newest < self._count:
            self._versions[self._newest] = self._seen()
            self.peak = max(self.peak, len(self._versions))

    def _last_user(self, version: int) -> int:
        return min(version + self._lag, self._count - 1)

    def _seen(self) -> dict[str, Tensor]:
        """The newest version as a forward takes it: the same memory, but other leaves of the graph.

        `.data` and not `detach()`: its version counter is its own, so that an optimizer step after `_move`,
        which does not touch this memory, does not make autograd refuse the backward.
        """
        return {name: item.data.requires_grad_() for name, item in self._parameters.items()}

    def _move(self, spare: Mapping[str, Tensor] | None) -> None:
        """Give the parameters other memory with the same values; the versions in use keep the old one."""
        with torch.no_grad():
            if spare is None:
                for item, copy in zip(self._parameters.values(), _copied(self._parameters.values()), strict=True):
                    item.data = copy
                return
            for name, item in self._parameters.items():
                item.data = spare[name].data.copy_(item.data)


def _copied(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Copies that lie to each other as the tensors do: cuDNN wants the weights of an LSTM in one piece.

    Apart they would be copied in every forward, and kept with it. Where other things fill most of the memory that
    tensors lie in, each is copied by itself.
    """
    tensors = [item.data for item in tensors]
    held: dict[int, int] = {}
    for item in tensors:
        address, _ = storage_of(item)
        held[address] = held.get(address, 0) + item.nbytes
    pieces: dict[int, torch.UntypedStorage] = {}
    copies = []
    for item in tensors:
        address, nbytes = storage_of(item)
        if 2 * held[address] < nbytes:
            copies.append(item.clone())
            continue
        if address not in pieces:
            pieces[address] = item.untyped_storage().clone()  # type: ignore[no-untyped-call]
        place = item.storage_offset(), item.shape, item.stride()
        copies.append(torch.empty(0, dtype=item.dtype, device=item.device).set_(pieces[address], *place))
    return copies
