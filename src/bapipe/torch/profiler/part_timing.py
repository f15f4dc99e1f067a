"""A layer in two parts, as two stages that divide it run it: what each takes, and what both keep."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from bapipe.torch.profiler.layer_clock import Clock
from bapipe.torch.profiler.layer_memory import saved_storages, storage_of
from bapipe.torch.profiler.layer_runner import LayerSequence, RunnableLayer, cast_weights, run_once, tensors_of
from bapipe.torch.profiler.layer_timing import PieceTimes, Walk, inputs_of, time_piece
from bapipe.torch.profiler.measurement import Measurement, PartTiming
from bapipe.torch.profiler.statistics import Stopping

__all__ = ["divisible", "parts_to_time", "time_parts"]


def divisible(measured: Measurement) -> tuple[int, ...]:
    """The layers that two stages can divide."""
    return tuple(index for index, layer in enumerate(measured.layers) if layer.split is not None)


def parts_to_time(measured: Measurement, size: int, round_: int, *, least: int) -> list[int]:
    """The layers whose parts this round has still to time at that size, each with so many samples at least."""
    if measured.parts_not_fitting and size >= min(measured.parts_not_fitting):
        return []
    done = {
        item.layer
        for item in measured.part_rounds(size)
        if item.round == round_ and item.forward[0].host.count >= least
    }
    return [layer for layer in divisible(measured) if layer not in done]


def time_parts(
    chain: LayerSequence,
    layer: int,
    values: Walk,
    *,
    size: int,
    round_: int,
    clock: Clock,
    stopping: Stopping,
    warmup: int,
    whole: bool,
    weigh: bool,
) -> PartTiming:
    """Time the layer's first half, then its second with the join of both, each alone.

    `whole`: the layer itself too, where it is not timed alone; `weigh`: what both keep beyond the whole layer. The
    weights of a part are copies, as on a stage of its own, and are let go with it.
    """
    split = chain.layers[layer].split
    assert split is not None, "only layers that can be divided are timed so"
    half = split.channels // 2
    first, second = (
        chain.piece(layer, layer, part=(0, half)),
        chain.piece(layer, layer, part=(half, split.channels)),
    )
    ahead = inputs_of(first, values, chain.device)
    sent = run_once(first, ahead)
    behind: list[Any] = [
        value.clone().requires_grad_(flag) for value, flag in zip(sent, second.receives, strict=True)
    ]
    behind += [values.leaves[index] for index in second.roots]

    def timed(piece: RunnableLayer, inputs: Sequence[Any]) -> PieceTimes:
        return time_piece(piece, inputs, clock=clock, stopping=stopping, warmup=warmup, apart=False)

    times = timed(first, ahead), timed(second, behind)
    undivided = chain.piece(layer, layer)
    own = timed(undivided, inputs_of(undivided, values, chain.device)) if whole else None
    saved_activations = None
    if weigh:
        saved_activations = _kept(first, ahead) + _kept(second, behind, received=True)
        given = inputs_of(undivided, values, chain.device)
        cast_weights(undivided, given)
        saved_activations -= _kept(undivided, given, received=True)
    if chain.mixed is not None:
        chain.mixed.forget((*first.parameters, *second.parameters))
    return PartTiming(
        layer=layer,
        microbatch=size,
        round=round_,
        forward=(times[0].forward, times[1].forward),
        backward=(times[0].backward, times[1].backward),
        whole_forward=own.forward if own else None,
        whole_backward=own.backward if own else None,
        saved_activations=None if saved_activations is None else float(saved_activations),
    )


def _kept(piece: RunnableLayer, inputs: Sequence[Any], *, received: bool = False) -> int:
    """Bytes that autograd saves in a forward, apart from weights, inputs of the model and what is sent on.

    `received`: what was received counts too, where it is saved.
    """
    outputs, saved = saved_storages(piece, inputs)
    given = inputs[len(piece.receives) :] if received else inputs
    known = piece.known_storages() | {storage_of(item)[0] for item in tensors_of(list(given))}
    known |= {storage_of(item)[0] for item in outputs if isinstance(item, Tensor)}
    return sum(nbytes for address, nbytes in saved.items() if address not in known)
