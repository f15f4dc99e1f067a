"""What it costs to shard training over replicas: optimizer states (ZeRO-1), or all of it (FSDP2).

A ring's reduce-scatter and all-gather each take half of its all-reduce. gloo, over which CPUs talk, makes a
reduce-scatter of a whole all-reduce.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bapipe.costs.segments import Chain
from bapipe.costs.stage_memory import StageBytes
from bapipe.costs.stage_time import UnitSeconds
from bapipe.hardware.cluster import Cluster
from bapipe.planner.gradient_rings import all_reduce_time, gradient_sum_time

__all__ = [
    "FsdpSeconds",
    "engine_peak",
    "fsdp_seconds",
    "gather_time",
    "module_of",
    "scatter_share",
    "sharded_copies",
    "units_of",
]

_GATHERED = 2
"""units whose weights are whole at once: the one at work and the one that is fetched ahead"""
_GRADIENTS = 2
"""units whose gradients are whole at once: the one at work, and the one that is being summed"""


def scatter_share(cluster: Cluster, members: Sequence[int]) -> float:
    """What a reduce-scatter takes of the all-reduce of as many bytes."""
    return 0.5 if all(cluster.type_of(index).kind == "gpu" for index in members) else 1.0


def gather_time(cluster: Cluster, members: tuple[int, ...], size: float) -> float:
    """Seconds of an all-gather after which each has so many bytes."""
    return 0.5 * all_reduce_time(cluster, members, size) if size > 0 else 0.0


def sharded_copies(state: float, workspace: float, replicas: int) -> tuple[float, float]:
    """Under ZeRO-1, in copies of what is trained: weights, gradients and optimizer state of a replica, and those
    and what the step makes. In the step only a replica's share of the gradients is left."""
    always = 2 + state / replicas
    return always, max(always, 1 + (1 + state + workspace) / replicas)


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
class FsdpSeconds:
    """What a micro-batch takes with all that is sent for it."""

    forward: float
    backward: float


def fsdp_seconds(chain: Chain, cluster: Cluster, members: tuple[int, ...], rows: Sequence[int]) -> FsdpSeconds:
    """Forward and backward of a micro-batch under FSDP2, on the slowest of the accelerators. Linear in the units.

    Weights of a unit are gathered while the unit before computes, in the forward and again in the backward, and
    its gradients are scattered while the next backward runs; all share the links. The model's own unit is gathered
    once. On CPUs nothing overlaps, as gloo's collectives are waited for.
    """
    seconds = UnitSeconds.of(chain)
    units = units_of(chain)
    overlaps = all(cluster.type_of(index).kind == "gpu" for index in members)
    share = scatter_share(cluster, members)
    slowest = max(rows, key=lambda row: float(seconds.work[row].sum()))
    forward = [float(seconds.forward[slowest, own].sum()) for _, own in units]
    backward = [float(seconds.backward[slowest, own].sum()) for _, own in units]
    gathers = [gather_time(cluster, members, float(chain.weight_bytes[own].sum())) for _, own in units]
    scatters = [
        share * gradient_sum_time(cluster, members, float(chain.trainable_bytes[own].sum())) for _, own in units
    ]
    own = next((index for index, (name, _) in enumerate(units) if name is None), None)
    first = 0.0 if own is None else gathers[own]
    inner = [index for index in range(len(units)) if index != own]
    if not overlaps:
        extra = sum(gathers[index] for index in inner)
        return FsdpSeconds(forward=sum(forward) + first + extra, backward=sum(backward) + extra + sum(scatters))
    # Forward: the links and the compute, each one thing at a time.
    link = done = first
    begins = [done]
    for index in range(len(units)):
        if index != own:
            # Fetched ahead by one: not before the unit before the last has ended and its weights are free.
            link = max(link, begins[-2] if len(begins) > 1 else 0.0) + gathers[index]
            done = max(done, link)
        begins.append(done)
        done += forward[index]
    whole_forward = done
    # Backward: the weights of the next unit are fetched when a unit begins, before its gradients are summed.
    order = [index for index in range(len(units) - 1, -1, -1) if index != own]
    link = gathers[order[0]] if order else 0.0
    ready, done = link, 0.0
    for place, index in enumerate(order):
        begin = max(done, ready)
        if place + 1 < len(order):
            link = ready = max(link, begin) + gathers[order[place + 1]]
        done = begin + backward[index]
        link = max(link, done) + scatters[index]
    if own is not None:
        done += backward[own]
        link = max(link, done) + scatters[own]
    return FsdpSeconds(forward=whole_forward, backward=max(done, link))


def engine_peak(
    engine: str, chain: Chain, needed: StageBytes, *, replicas: int, state: float, workspace: float
) -> dict[str, float]:
    """Most that a rank of torch's DDP or FSDP2 holds, by the parts of `PeakBytes`.

    The optimizer's `state` and `workspace` are in copies of what is trained.
    DDP has its gradients from the start on, as views of the buckets that it sums. FSDP2 has a share of everything,
    and some units whole: those whose weights are gathered and whose gradients are being made or summed.
    """
    own, trained = needed.weights, needed.trained
    step = workspace * trained
    at_work = needed.saved_activations + needed.workspace + needed.casts
    if engine == "ddp":
        both = at_work > step
        return {
            "weights": own + (needed.casts if both else 0.0),
            "gradients": trained,
            "optimizer": state * trained,
            "activations": needed.saved_activations if both else 0.0,
            "buffers": 0.0,
            "workspace": needed.workspace if both else step,
        }
    units = units_of(chain)
    sizes = {name: float(chain.weight_bytes[places].sum()) for name, places in units}
    gradients = {name: float(chain.trainable_bytes[places].sum()) for name, places in units}
    inner = [name for name in sizes if name is not None]
    largest = max((sizes[name] for name in inner), default=0.0)
    made = max((gradients[name] for name in inner), default=0.0)
    root, root_made = sizes.get(None, 0.0), gradients.get(None, 0.0)
    gathered = root + min(_GATHERED, len(inner)) * largest
    summed = root_made + _GRADIENTS * made
    both = at_work + gathered + summed > step / replicas
    return {
        "weights": own / replicas + ((gathered + needed.casts) if both else 0.0),
        "gradients": trained / replicas + (summed if both else 0.0),
        "optimizer": state * trained / replicas,
        "activations": needed.saved_activations if both else 0.0,
        "buffers": 0.0,
        "workspace": needed.workspace if both else step / replicas,
    }
