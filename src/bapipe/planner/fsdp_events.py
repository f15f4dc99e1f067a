"""One micro-batch under FSDP2: what runs when, and what is there when. The one place that says so.

Units are the modules that `fully_shard` was called on, and the model itself, the root, with the rest. As torch
2.11 and 2.13 run them (`torch/distributed/fsdp/_fully_shard`), with nothing set by the user ("-" scatters):

    forward     links     root | h.0 | h.1 | h.2 |
                compute         root | h.0 | h.1 | h.2 | root
    backward    links     h.2 | h.1 | -h.2 | h.0 | -h.1 | -h.0 | -root
                compute   root | h.2 | h.1 | h.0 | root

1. A unit's weights are gathered before its forward, are let go after it, and the same in its backward. The root's
   stay from its forward to the end of the backward.
2. All-gathers and reduce-scatters are of one process group, so that they run one after another, in the order in
   which the host asks for them. The host is ahead of the device.
3. In the forward the host asks for a unit's when it comes to it. The links begin when the unit before the last has
   begun, whose buffer is free then: they are up to two units ahead of the compute.
4. In the backward the host asks for the next unit's when a unit begins, and for the first one's when the root
   does: the links are one unit ahead.
5. Gradients are scattered when a unit's backward has ended. They are copied into a buffer first, for which the
   compute waits until the scatter before has ended.
6. The root's gradients are scattered last. The backward ends when all scatters have, and the next micro-batch
   begins after that with everything sharded: every micro-batch gathers twice and scatters.

Where no gradient is wanted of a unit's output, as before the first trained weight, its backward does not run; but
its weights may be fetched ahead. On CPUs the host waits for every collective, so that all is in a row. Memory is
the same there, as torch's allocator goes by the order in which the host asks, not by when the device runs. The
host's own work for a unit, which nothing hides there, is in the cluster's `fsdp_units` where it was measured.

Weights are gathered into a buffer and copied out of it. In the forward the buffer stays until the next unit's
weights are copied out; in the backward it goes at once, and the next one's comes. Of gradients that are copied
into a buffer the last parameter's stays until they are scattered. gloo copies what it gathers or scatters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from bapipe.costs.segments import Chain, Floats
from bapipe.costs.stage_memory import StageBytes
from bapipe.costs.stage_time import UnitSeconds
from bapipe.hardware.cluster import Cluster
from bapipe.planner.gradient_rings import all_gather, on_gpus, reduce_scatter

__all__ = ["FsdpSeconds", "fsdp_peak", "fsdp_seconds", "module_of", "units_of"]


def module_of(paths: Sequence[str]) -> str | None:
    """The module that FSDP2 shards as one unit and that a layer of these modules is in; None: the model itself.

    That is the numbered one of a list of modules, such as `transformer.h.3` of `transformer.h.3.mlp.c_fc`.
    """
    for path in paths:
        names = path.split(".")
        place = next((index for index, name in enumerate(names) if name.isdecimal()), None)
        if place is not None:
            return ".".join(names[: place + 1])
    return None


def units_of(chain: Chain) -> list[tuple[str | None, list[int]]]:
    """What FSDP2 shards as one: each module of a list, by its path, or where modules are not known each layer; and
    the model itself, None, with the rest. With the units of the chain that are in it."""
    layers = chain.profile.layers
    known = any(layer.modules for layer in layers)
    found: dict[str | None, list[int]] = {}
    for index, unit in enumerate(chain.units):
        layer = layers[unit.layer]
        found.setdefault(module_of(layer.modules) if known else layer.name, []).append(index)
    return list(found.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class _FsdpPart:
    """Layers that run one after another: all of a unit, or some of the root's."""

    root: bool
    layers: tuple[int, ...]
    """units of the chain"""
    weights: float
    """bytes of the unit's weights, and below of its trained ones; 0 for the root's"""
    trained: float
    last: float
    """of these, the ones of its last trained layer"""
    answered: bool
    """whether its backward runs"""


def _last(trained: Floats) -> float:
    found = trained[trained > 0]
    return float(found[-1]) if len(found) else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """A model, in the order of its forward."""

    parts: tuple[_FsdpPart, ...]
    weights: float
    """of the root, below its trained ones, and those of its last trained layer"""
    trained: float
    tail: float

    @classmethod
    def of(cls, chain: Chain) -> _Parts:
        """Linear in the layers. A unit is where its first layer is."""
        weights, trained = chain.weight_bytes, chain.trainable_bytes
        units = dict(units_of(chain))
        own = units.pop(None, [])
        begins = {layers[0]: layers for layers in units.values()}
        runs: list[tuple[bool, list[int]]] = []
        for index in range(len(chain)):
            if index in begins:
                runs.append((False, begins[index]))
            elif index in own:
                if not runs or not runs[-1][0]:
                    runs.append((True, []))
                runs[-1][1].append(index)
        parts, wanted = [], False
        for root, layers in runs:
            wanted = wanted or bool(trained[layers].sum() > 0 or chain.answered[layers].any())
            size = 0.0 if root else float(weights[layers].sum())
            made = 0.0 if root else float(trained[layers].sum())
            parts.append(
                _FsdpPart(
                    root=root,
                    layers=tuple(layers),
                    weights=size,
                    trained=made,
                    last=_last(trained[layers]),
                    answered=wanted,
                )
            )
        return cls(
            parts=tuple(parts),
            weights=float(weights[own].sum()),
            trained=float(trained[own].sum()),
            tail=_last(trained[own]),
        )

    def back(self) -> Iterator[tuple[_FsdpPart, _FsdpPart | None]]:
        """Parts in the order of the backward, as far as it runs, each with the unit that is fetched meanwhile."""
        units = [part for part in self.parts if not part.root]
        for part in reversed(self.parts):
            if part.answered:
                place = -1 if part.root else units.index(part)
                yield part, units[place - 1] if place > 0 else None

    @property
    def last(self) -> _FsdpPart | None:
        """The unit that is fetched when the backward begins."""
        return next((part for part in reversed(self.parts) if not part.root), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class FsdpSeconds:
    """What a micro-batch takes with all that is sent for it."""

    forward: float
    backward: float


def fsdp_seconds(chain: Chain, cluster: Cluster, members: tuple[int, ...], rows: Sequence[int]) -> FsdpSeconds:
    """Forward and backward of a micro-batch on the slowest of the accelerators, by the rules above. Linear in the
    layers."""
    seconds, model = UnitSeconds.of(chain), _Parts.of(chain)
    gather = all_gather(cluster, members).seconds_if_any
    scatter = reduce_scatter(cluster, members).seconds_if_any
    slowest = max(rows, key=lambda row: float(seconds.work[row].sum()))

    def forward(part: _FsdpPart) -> float:
        return float(seconds.forward[slowest, list(part.layers)].sum())

    def backward(part: _FsdpPart) -> float:
        return float(seconds.backward[slowest, list(part.layers)].sum())

    if not on_gpus(cluster, members):
        own = cluster.fsdp_units
        if own is not None:
            gather, scatter = own.gather.seconds_if_any, own.scatter.seconds_if_any
        back = list(model.back())
        fetched = {id(part): part for pair in back for part in pair if part is not None}
        if model.last is not None:
            fetched[id(model.last)] = model.last
        ahead = sum(forward(part) + gather(part.weights) for part in model.parts)
        sent = sum(gather(part.weights) for part in fetched.values()) + scatter(model.trained)
        return FsdpSeconds(
            forward=ahead + gather(model.weights),
            backward=sent + sum(backward(part) + scatter(part.trained) for part, _ in back),
        )
    return FsdpSeconds(
        forward=_forward_end(model, [forward(part) for part in model.parts], gather),
        backward=_backward_end(model, {id(part): backward(part) for part in model.parts}, gather, scatter),
    )


def _forward_end(model: _Parts, compute: Sequence[float], gather: Callable[[float], float]) -> float:
    """When the compute has ended; `link` is free at that time of the links."""
    link = done = gather(model.weights)
    begun = [done]
    for part, seconds in zip(model.parts, compute, strict=True):
        if not part.root:
            link = max(link, begun[-2] if len(begun) > 1 else 0.0) + gather(part.weights)
            done = max(done, link)
            begun.append(done)
        done += seconds
    return done


def _backward_end(
    model: _Parts,
    compute: Mapping[int, float],
    gather: Callable[[float], float],
    scatter: Callable[[float], float],
) -> float:
    """When the compute has ended and all gradients are scattered."""
    link = fetched = 0.0 if model.last is None else gather(model.last.weights)
    done = scattered = 0.0
    for part, following in model.back():
        if part.root:
            done += compute[id(part)]
            continue
        begin = max(done, fetched)
        if following is not None:
            link = fetched = max(link, begin) + gather(following.weights)
        done = begin + compute[id(part)]
        if part.trained > 0:
            done = max(done, scattered)
            link = scattered = max(link, done) + scatter(part.trained)
    if model.trained > 0:
        done = max(done, scattered)
        link = max(link, done) + scatter(model.trained)
    return max(done, link)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Moment:
    """What is on a rank besides its shares of weights and optimizer state."""

    weights: float
    """whole ones and buffers of gathers"""
    gradients: float
    """shares, whole ones and buffers of scatters"""
    activations: float
    workspace: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.activations + self.workspace


def _moments(chain: Chain, needed: StageBytes, *, replicas: int, again: bool, gloo: bool) -> Iterator[_Moment]:
    """Of one micro-batch, whenever something has been allocated; `again`: gradients of one before are there."""
    copies = 1.0 if gloo else 0.0
    model = _Parts.of(chain)
    trained = chain.trainable_bytes
    shares = needed.trained / replicas if again else 0.0
    if chain.phases_known:
        held = np.concatenate([[0.0], np.cumsum(chain.saved_activations)])
        library = float(chain.library.max())
        ahead, back = chain.forward_workspace + library, chain.backward_workspace + library
    else:
        # All at its most at once.
        held = np.full(len(chain) + 1, needed.saved_activations)
        ahead = back = np.full(len(chain), needed.workspace)

    def at(layer: int, workspace: float, whole: float, gradients: float) -> _Moment:
        """With what the layers up to this one have saved."""
        return _Moment(weights=whole, gradients=gradients, activations=float(held[layer]), workspace=workspace)

    root = model.weights
    buffer = root
    for part in model.parts:
        if not part.root:
            yield at(part.layers[0], 0.0, root + buffer + 2 * part.weights, shares)
            buffer = part.weights
        for layer in part.layers:
            yield at(layer + 1, float(ahead[layer]), root + buffer + part.weights, shares)
    buffer = model.last.weights if model.last is not None and root > 0 else 0.0
    made = scattering = 0.0
    yield at(len(chain), 0.0, root + (1 + copies) * buffer, shares)
    for part, following in model.back():
        if not part.root:
            buffer = part.weights
            yield at(part.layers[-1] + 1, 0.0, root + buffer + part.weights, shares + made + scattering)
            buffer = 0.0 if following is None else following.weights
            whole = root + part.weights + (1 + copies) * buffer
            yield at(part.layers[-1] + 1, 0.0, whole, shares + made + scattering)
        own = made if part.root else 0.0
        others = 0.0 if part.root else made
        for layer in reversed(part.layers):
            whole = root + buffer + part.weights
            yield at(layer + 1, float(back[layer]), whole, shares + others + own + scattering)
            own += float(trained[layer])
        if part.root:
            made = own
            continue
        yield at(part.layers[0], 0.0, root + buffer + part.weights, shares + made + own + scattering)
        if part.trained > 0:
            scattering, share = part.trained, part.trained / replicas
            yield at(part.layers[0], 0.0, root + buffer, shares + made + own + scattering)
            sent = part.last + (1 + copies) * scattering + share
            yield at(part.layers[0], 0.0, root + buffer, shares + made + sent)
            shares += 0.0 if again else share
    yield at(0, 0.0, 0.0, shares + 2 * made)
    yield at(0, 0.0, 0.0, shares + model.tail + (1 + copies + 1 / replicas) * made)


def fsdp_peak(
    chain: Chain,
    needed: StageBytes,
    *,
    replicas: int,
    state: float,
    workspace: float,
    microbatches: int,
    gloo: bool,
) -> dict[str, float]:
    """Most that a rank holds, by the parts of `PeakBytes`, with so many micro-batches of its own a step.

    `gloo`: its collectives go by that, as on CPUs.

    The optimizer's `state` and `workspace` are in copies of what is trained. Linear in the layers.
    """
    moments = _moments(chain, needed, replicas=replicas, again=microbatches > 1, gloo=gloo)
    most = max(moments, key=lambda moment: moment.total)
    trained = needed.trained / replicas
    if most.total + needed.casts < trained * (1 + workspace):
        most = _Moment(weights=0.0, gradients=trained, activations=0.0, workspace=workspace * trained)
        casts = 0.0
    else:
        casts = needed.casts
    return {
        "weights": needed.weights / replicas + most.weights + casts,
        "gradients": most.gradients,
        "optimizer": state * trained,
        "activations": most.activations,
        "buffers": 0.0,
        "workspace": most.workspace,
    }
