"""Bytes: what crosses each cut, what the backward saves, and each layer's workspace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bapipe.costs.stage_memory import needed_beyond
from bapipe.torch.compiling.layer_program import DeferredGradients
from bapipe.torch.device.cuda_workspaces import release_workspaces
from bapipe.torch.profiler.layer_runner import LayerSequence, RunnableLayer, run_once
from bapipe.torch.profiler.measurement import Measurement, SizeMemory
from bapipe.torch.profiler.repeated_layers import bytes_of_model
from bapipe.torch.stage.split_backward import DelayedWeights, SplitBackward

__all__ = ["is_out_of_memory", "predicted_peak", "saved_storages", "storage_of", "weigh"]


def storage_of(tensor: Tensor) -> tuple[int, int]:
    """(address, bytes) of the memory that a tensor lies in; the same for all its views."""
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on a GPU or on the host."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and ("not enough memory" in text or "CUDNN_STATUS_ALLOC_FAILED" in text
                                                or "can't allocate memory" in text)  # fmt: skip


@dataclass(slots=True)
class _Flight:
    """Storages of values on their way to a later layer."""

    owner: dict[int, tuple[int, int]] = field(default_factory=dict)
    """address -> (layer that received it first, bytes)"""
    kept: dict[int, int] = field(default_factory=dict)
    """address -> last layer that saved it"""

    def land(self, still: set[int], saved_activations: list[float], before: list[float]) -> None:
        """Book what no longer travels, if anyone saved it, to the layer that received it first; `before`: of this,
        what that one did not save, nor one after it."""
        for address in [address for address in self.owner if address not in still]:
            layer, size = self.owner.pop(address)
            if address in self.kept:
                saved_activations[layer] += size
                before[layer] += size if self.kept.pop(address) < layer else 0.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Once:
    """One forward and backward of one layer."""

    outputs: tuple[Any, ...]
    saved: dict[int, int]
    """address -> bytes of what autograd kept"""
    peak_forward: float
    """bytes above what was there before"""
    peak_backward: float
    peak_weights: float | None
    """bytes above what is held between the two parts of a backward, while the second runs; None: there is no first
    part"""
    library: float
    """bytes that libraries took when it ran first, and keep"""


def weigh(chain: LayerSequence, pieces: Sequence[RunnableLayer], size: int) -> SizeMemory:
    """Walk through the layers once with gradients and count each storage that autograd keeps.

    A value that crosses a cut is counted by the layer that receives it, if anyone saved it; inputs of the model
    always, by the first layer that takes them; outputs of the model by the last. Parameters and buffers never.
    The sum over all layers is then what the whole model keeps. The workspace comes from the allocator on a GPU; on
    a CPU it is the gradients of what the layer takes, returns and owns.
    """
    leaves, _ = chain.inputs(size)
    state = {storage_of(tensor)[0] for tensor in chain.state()}
    casts = _casts(chain, pieces, size)
    if chain.mixed is not None:
        state |= chain.mixed.addresses
    count = len(pieces)
    saved_activations, onward, backward, later, library = ([0.0] * count for _ in range(5))
    ahead, back, passing, returning, before, kept = ([0.0] * count for _ in range(6))
    flight = _Flight()
    roots: set[int] = set()
    values: Sequence[Any] = ()
    for index, piece in enumerate(pieces):
        received = [
            value.detach().requires_grad_(flag) for value, flag in zip(values, piece.receives, strict=True)
        ]
        taken = [leaves[root] for root in piece.roots]
        for address, nbytes in (storage_of(leaf) for leaf in taken if isinstance(leaf, Tensor)):
            if address not in roots | state:
                roots.add(address)
                saved_activations[index] += nbytes
        once = _once(piece, received, taken)
        outputs = _tensors(once.outputs)
        sent = {address: nbytes for address, nbytes in map(storage_of, outputs) if nbytes}
        fresh = {
            key: nbytes for key, nbytes in sent.items() if key not in state | roots and key not in flight.owner
        }
        own = 0.0
        for address, nbytes in once.saved.items():
            kept[index] += nbytes if address in flight.owner else 0.0
            if address in flight.owner or address in fresh:
                flight.kept[address] = index
            elif address not in state | roots:
                own += nbytes
        saved_activations[index] += own
        library[index] = once.library
        ahead[index], back[index] = _both_ways(outputs)
        passing[index], returning[index] = _both_ways([v for v in outputs if storage_of(v)[0] not in fresh])
        loose = sum(nbytes for key, (_, nbytes) in flight.owner.items() if key not in flight.kept)
        unsaved = sum(nbytes for address, nbytes in fresh.items() if address not in once.saved)
        if chain.device.type == "cuda":
            onward[index] = max(0.0, once.peak_forward + loose - own)
            backward[index] = max(0.0, once.peak_backward - unsaved - own)
            later[index] = backward[index] if once.peak_weights is None else once.peak_weights
        else:
            gradients = sum(value.nbytes for value in received if value.requires_grad)
            later[index] = sum(item.nbytes for item in piece.parameters)
            backward[index] = back[index] + gradients + later[index]
        last = index + 1 == count
        flight.owner.update({address: (index if last else index + 1, nbytes) for address, nbytes in fresh.items()})
        if last:
            flight.kept |= dict.fromkeys(sent, index)
        flight.land(set() if last else set(sent), saved_activations, before)
        values = [value.detach() if isinstance(value, Tensor) else value for value in once.outputs]
        del once, received, outputs
    return SizeMemory(
        microbatch=size,
        boundary_forward=tuple(ahead),
        boundary_backward=tuple(back),
        saved_activations=tuple(saved_activations),
        workspace=tuple(max(pair) for pair in zip(onward, backward, strict=True)),
        forward_workspace=tuple(onward),
        backward_workspace=tuple(backward),
        weight_workspace=tuple(float(size) for size in later),
        library=tuple(library),
        passing_forward=tuple(passing),
        passing_backward=tuple(returning),
        saved_before=tuple(before),
        kept_input=tuple(kept),
        weight_casts=casts,
    )


def _casts(chain: LayerSequence, pieces: Sequence[RunnableLayer], size: int) -> tuple[float, ...]:
    """Bytes of each layer's cast weights, all of which are there afterwards; () without mixed precision."""
    mixed = chain.mixed
    if mixed is None:
        return ()
    leaves, _ = chain.inputs(size)
    values: Sequence[Any] = ()
    for piece in pieces:
        values = run_once(piece, (*values, *(leaves[root] for root in piece.roots)))
    return tuple(mixed.cast_bytes(piece.parameters) for piece in pieces)


def _both_ways(values: Sequence[Tensor]) -> tuple[float, float]:
    """Bytes of the values, and of their errors."""
    return float(sum(v.nbytes for v in values)), float(sum(v.nbytes for v in values if v.requires_grad))


def _tensors(values: Sequence[Any]) -> list[Tensor]:
    return [value for value in values if isinstance(value, Tensor)]


def saved_storages(piece: RunnableLayer, arguments: Sequence[Any]) -> tuple[tuple[Any, ...], dict[int, int]]:
    """Outputs of a forward, and the storages that autograd saved: address -> bytes.

    A view is handed back: an output that is saved as it is holds its own graph, which then outlives the last use.
    """
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        address, nbytes = storage_of(tensor)
        if nbytes:
            saved[address] = nbytes
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = tuple(piece.run(*arguments))
    return outputs, saved


def _once(piece: RunnableLayer, received: Sequence[Any], roots: Sequence[Any]) -> _Once:
    arguments = _arguments(piece, received, roots)
    device = next((value.device for value in _tensors([*arguments, *piece.parameters])), torch.device("cpu"))
    for parameter in piece.parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    if device.type != "cuda":
        outputs, saved = saved_storages(piece, arguments)
        return _Once(
            outputs=outputs, saved=saved, peak_forward=0.0, peak_backward=0.0, peak_weights=None, library=0.0
        )
    release_workspaces()
    idle = torch.cuda.memory_allocated(device)
    _backward(piece.run(*arguments), received)
    library = max(0, torch.cuda.memory_allocated(device) - idle)
    arguments = _arguments(piece, received, roots)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    outputs, saved = saved_storages(piece, arguments)
    forward = torch.cuda.max_memory_allocated(device) - before
    plain = [value.detach() if isinstance(value, Tensor) else value for value in outputs]
    flags = [isinstance(value, Tensor) and value.requires_grad for value in outputs]
    torch.cuda.reset_peak_memory_stats(device)
    _backward(outputs, received)
    backward = torch.cuda.max_memory_allocated(device) - before
    weights = _peak_of_weights(piece, _arguments(piece, received, roots), received, device)
    result = tuple(value.requires_grad_() if flag else value for value, flag in zip(plain, flags, strict=True))
    return _Once(
        outputs=result,
        saved=saved,
        peak_forward=float(forward),
        peak_backward=float(backward),
        peak_weights=weights,
        library=float(library),
    )


def _peak_of_weights(
    piece: RunnableLayer, arguments: Sequence[Any], received: Sequence[Any], device: torch.device
) -> float | None:
    """Most bytes above what there was before, while deferred weight gradients are computed; None where no
    gradient is sent back, so that all of the backward is deferred."""
    leaves = [value for value in _tensors(received) if value.requires_grad]
    outputs, deferred = piece.forward_deferring(arguments) if piece.compiled else (piece.run(*arguments), [])
    ends = [value for value in _tensors(outputs) if value.requires_grad]
    if not leaves or not ends:
        return None
    gradients = [torch.ones_like(value) for value in ends]
    parts: list[DeferredGradients] | list[DelayedWeights] = deferred
    if piece.compiled:
        torch.autograd.backward(ends, gradients)
    else:
        parts = [SplitBackward(piece.parameters).run(ends, gradients, leaves)]
    for value in leaves:
        value.grad = None
    del ends, outputs, gradients
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    for part in parts:
        part.run()
    return float(torch.cuda.max_memory_allocated(device) - before)


def _arguments(piece: RunnableLayer, received: Sequence[Any], roots: Sequence[Any]) -> list[Any]:
    return [value.clone() for value in (*received, *roots)] if piece.overwrites else [*received, *roots]


def _backward(outputs: Sequence[Any], received: Sequence[Any]) -> None:
    ends = [value for value in _tensors(outputs) if value.requires_grad]
    if ends:
        torch.autograd.backward(ends, [torch.ones_like(value) for value in ends])
    for value in _tensors(received):
        value.grad = None


def predicted_peak(measured: Measurement, microbatch: int) -> float | None:
    """Most bytes that the forward and backward of the model need: weights, casts, gradients, saved activations and
    workspace. The optimizer is not in it, as in the peak that is measured beside it.

    The workspace of a layer counts while only the layers up to it still hold their saved activations; the output
    and its gradient are held to the end. None where what the libraries hold is not known, as on a CPU.
    """
    memory = bytes_of_model(measured, measured.memory_at(microbatch))
    known = [item.idle for item in measured.whole if item.microbatch == microbatch and item.idle is not None]
    if not known:
        return None
    output = memory.boundary_forward[-1] + memory.boundary_backward[-1]
    held, layers = np.cumsum(memory.saved_activations), np.arange(len(memory.saved_activations))
    beyond = needed_beyond(np.array(memory.workspace), held, layers, np.full(len(held), output))
    always = max(known) + measured.state_bytes + sum(memory.weight_casts) + measured.gradient_bytes
    return always + float(held[-1] + beyond[-1]) + output
