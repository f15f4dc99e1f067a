"""What the exact partitioner is given and what it returns, and the one place where a plan's time is defined.

A plan is a list of stages, each a run of consecutive layers on r accelerators of one type. With w_s the work of
stage s per micro-batch (forward + backward, + forward again if it recomputes), r_s its replicas, cf and cb the
seconds its outgoing cut keeps a link busy each way, c_s = max(cf, cb), or cf + cb on a half-duplex link:

    fill    Φ = Σ_s w_s + Σ_cuts (cf + cb)
    steady  B = max( max_s (⌈M/r_s⌉ − 1)·w_s , max_cuts (⌈M/min(r_s, r_{s+1})⌉ − 1)·c_s )
    update  Ω = max_s ( reduce_rate[r_s] · gradient bytes of s + update seconds of s )
    time    T = Φ + B + Ω

With exposed communication (1F1B-SNO) w_s in B, and only there, also holds cf + cb of the cut after the stage:
N alike stages then give (M + N − 1)(F + B) + (N + M − 2)·(cf + cb), a little more than the paper's Table II, which
has ⌈(M − 1)/N⌉ exposed transfers fewer each way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bapipe.costs.stage_memory import HeldBytes
from bapipe.errors import BaPipeError, InfeasibleError
from bapipe.schedule.inflight import inflight_microbatches

__all__ = ["UNLIMITED", "Choice", "Communication", "PartitionStage", "Problem", "Recompute", "Solution", "score"]

Recompute = Literal["never", "allowed", "always"]
Communication = Literal["overlapped", "exposed"]

UNLIMITED = 2**60
"""bytes that no stage reaches: the capacity of an accelerator without a limit"""

_FLOATS = ("forward", "backward", "send_forward", "send_backward", "reduce_rate", "update")
_INTS = (
    "counts",
    "weights_bytes",
    "saved_bytes",
    "input_bytes",
    "gradient_bytes",
    "capacity",
    "overhead",
    "inflight",
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Problem:
    """L layers, accelerators of several types, and the rules a plan must keep.

    Arrays are converted on construction: seconds to float64, bytes and counts to int64 (bytes above UNLIMITED,
    infinity included, become UNLIMITED). Raises BaPipeError for shapes that do not agree, negative or NaN values.
    """

    forward: NDArray[np.float64]
    """[type, layer] seconds per micro-batch"""
    backward: NDArray[np.float64]
    """[type, layer] seconds per micro-batch"""
    counts: NDArray[np.int64]
    """[type] accelerators there are"""
    order: tuple[int, ...] | None = None
    """types along a cabled chain, first stage first; stages use neighbouring accelerators, a contiguous run of
    the chain. None: any accelerator may follow any other"""
    send_forward: NDArray[np.float64]
    """[layer < L−1] seconds a link needs for what crosses the cut after the layer; inf forbids the cut"""
    send_backward: NDArray[np.float64]
    """[layer < L−1] the same for the gradient"""
    duplex_half: bool = False
    """whether both directions share a link's time"""
    weights_bytes: NDArray[np.int64]
    """[layer] weights, gradients and optimizer state together"""
    saved_bytes: NDArray[np.int64]
    """[layer] kept per in-flight micro-batch for backward"""
    input_bytes: NDArray[np.int64]
    """[layer] what enters the layer, kept per in-flight micro-batch if its stage recomputes and starts there"""
    gradient_bytes: NDArray[np.int64]
    """[layer] all-reduced between the replicas of a stage"""
    capacity: NDArray[np.int64]
    """[type] memory"""
    overhead: NDArray[np.int64]
    """[type] memory that is taken whatever runs"""
    microbatches: int
    """M, in a global batch, all replicas together"""
    inflight: NDArray[np.int64]
    """[d] in-flight micro-batches at a stage with d accelerators from it to the pipeline's end, itself included;
    a replica of r holds ⌈min(M, inflight[d]) / r⌉. Entry 0 is not used"""
    max_replicas: int = 1
    reduce_rate: NDArray[np.float64]
    """[r] seconds per gradient byte of an all-reduce between r replicas. Entry 0 is not used"""
    update: NDArray[np.float64]
    """[type, layer] seconds of the optimizer step"""
    recompute: Recompute = "never"
    """whether a stage may, or must, keep only its inputs and repeat its forward before backward"""
    num_stages: int | None = None
    """exactly so many stages of one accelerator each, or None for any number"""
    use_all: bool = False
    """whether every accelerator must be used"""
    count_communication: Communication = "overlapped"

    def __post_init__(self) -> None:
        for name in _FLOATS:
            object.__setattr__(self, name, np.asarray(getattr(self, name), np.float64))
        for name in _INTS:
            object.__setattr__(self, name, _whole(name, getattr(self, name)))
        _check(self)

    @classmethod
    def unlimited(
        cls, *, forward: ArrayLike, backward: ArrayLike, counts: ArrayLike, microbatches: int, **rest: Any
    ) -> Self:
        """Return a problem in which all that is not given costs nothing and memory does not matter.

        forward and backward may be [layer] for one type or [type, layer]; inflight is 1F1B's, d.
        """
        forward, backward = np.atleast_2d(forward), np.atleast_2d(backward)
        types, layers = forward.shape
        zeros = np.zeros(layers)
        given: dict[str, Any] = {
            "forward": forward,
            "backward": backward,
            "counts": np.atleast_1d(counts),
            "microbatches": microbatches,
            **dict.fromkeys(("send_forward", "send_backward"), zeros[1:]),
            **dict.fromkeys(("weights_bytes", "saved_bytes", "input_bytes", "gradient_bytes"), zeros),
            "capacity": np.full(types, UNLIMITED),
            "overhead": np.zeros(types),
            "inflight": [inflight_microbatches("1f1b", d, microbatches) for d in range(int(np.sum(counts)) + 1)],
            "reduce_rate": np.zeros(rest.get("max_replicas", 1) + 1),
            "update": np.zeros((types, layers)),
        }
        return cls(**{**given, **rest})

    @property
    def layers(self) -> int:
        """L."""
        return int(self.forward.shape[1])

    @property
    def accelerators(self) -> int:
        """N, of all types together."""
        return int(self.counts.sum())

    @property
    def types(self) -> int:
        """How many types of accelerator there are."""
        return len(self.counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Where a run of layers goes."""

    first_layer: int
    last_layer: int
    """inclusive"""
    type: int
    """index of the accelerator type"""
    replicas: int = 1
    recompute: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionStage(Choice):
    """A Choice with what it costs."""

    forward: float
    """seconds per micro-batch"""
    backward: float
    """seconds per micro-batch, a repeated forward included"""
    memory: int
    """bytes on each replica"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """A plan and its time by the definition at the head of this file; objective = fill + steady + update."""

    stages: tuple[PartitionStage, ...]
    objective: float
    """T, seconds per global batch"""
    fill: float
    """Φ"""
    steady: float
    """B"""
    update: float
    """Ω"""
    bottleneck: float
    """seconds per micro-batch of the slowest stage or link in steady state: the largest w_s/r_s (with exposed
    communication where that counts) and c_s/min(r_s, r_{s+1})"""
    lower_bound: float
    """no plan has a smaller T, up to rounding; equals objective if the least T was looked for and `exact`"""
    exact: bool
    """whether what was minimised, T or B, is proved least; False only where a size guard left out a part of the
    search that may hold better plans, and for plans that were only scored"""

    @property
    def cuts(self) -> tuple[int, ...]:
        """First layer of every stage but the first."""
        return tuple(stage.first_layer for stage in self.stages[1:])


def score(problem: Problem, choices: Sequence[Choice]) -> Solution:
    """Return the plan that `choices`, first stage first, make, with its time and memory. Cost: O(L).

    Nothing is claimed about its optimality (lower_bound 0). Accelerator counts and order are not checked. Raises
    InfeasibleError if a stage does not fit its memory or a cut is forbidden, BaPipeError if the choices do not
    cover the layers once and in order.
    """
    starts = [choice.first_layer for choice in choices]
    if starts != [0, *(choice.last_layer + 1 for choice in choices[:-1])]:
        raise BaPipeError(f"stages must follow one another from layer 0, got first layers {starts}")
    if choices[-1].last_layer != problem.layers - 1:
        raise BaPipeError(
            f"stages must end at layer {problem.layers - 1}, got {choices[-1].last_layer}; add the rest"
        )
    stages: list[PartitionStage] = []
    fill = steady = update = bottleneck = 0.0
    behind = sum(choice.replicas for choice in choices)
    for index, choice in enumerate(choices):
        stage = _stage(problem, choice, behind)
        behind -= choice.replicas
        room = int(problem.capacity[choice.type])
        if stage.memory > room:
            raise InfeasibleError(
                f"stage {index} (layers {choice.first_layer} to {choice.last_layer} on type {choice.type}) needs "
                f"{stage.memory} bytes, got {room}: {stage.memory - room} short; move layers away from it"
            )
        work = stage.forward + stage.backward
        fill += work
        span = slice(choice.first_layer, choice.last_layer + 1)
        step = float(problem.update[choice.type, span].sum())
        reduce = float(problem.reduce_rate[choice.replicas]) * float(problem.gradient_bytes[span].sum())
        update = max(update, reduce + step)
        if index + 1 < len(choices):
            there = float(problem.send_forward[choice.last_layer])
            back = float(problem.send_backward[choice.last_layer])
            if there + back == np.inf:
                raise InfeasibleError(
                    f"the cut after layer {choice.last_layer} is forbidden, got a stage {index} that ends there; "
                    "end it elsewhere"
                )
            fill += there + back
            link = there + back if problem.duplex_half else max(there, back)
            width = min(choice.replicas, choices[index + 1].replicas)
            steady = max(steady, (-(-problem.microbatches // width) - 1) * link)
            bottleneck = max(bottleneck, link / width)
            if problem.count_communication == "exposed":
                work += there + back
        steady = max(steady, (-(-problem.microbatches // choice.replicas) - 1) * work)
        bottleneck = max(bottleneck, work / choice.replicas)
        stages.append(stage)
    return Solution(
        stages=tuple(stages),
        objective=fill + steady + update,
        fill=fill,
        steady=steady,
        update=update,
        bottleneck=bottleneck,
        lower_bound=0.0,
        exact=False,
    )


def _stage(problem: Problem, choice: Choice, accelerators: int) -> PartitionStage:
    """Cost a choice that has `accelerators` from itself to the end of the pipeline."""
    span = slice(choice.first_layer, choice.last_layer + 1)
    forward = float(problem.forward[choice.type, span].sum())
    backward = float(problem.backward[choice.type, span].sum())
    inflight = min(problem.microbatches, int(problem.inflight[accelerators]))
    inflight = -(-inflight // choice.replicas)
    if choice.recompute:
        backward += forward
    static = int(problem.weights_bytes[span].sum())
    needed = HeldBytes(
        weights=static,
        trained=static,
        casts=0,
        saved_activations=int(problem.saved_bytes[span].sum()),
        delayed=0,
        kept=int(problem.input_bytes[choice.first_layer]),
        buffers=0,
        workspace=int(problem.overhead[choice.type]),
    )
    return PartitionStage(
        **{field.name: getattr(choice, field.name) for field in fields(Choice)},
        forward=forward,
        backward=backward,
        memory=int(needed.held(1, inflight, recompute=choice.recompute)),
    )


def _whole(name: str, values: ArrayLike) -> NDArray[np.int64]:
    array = np.asarray(values)
    if array.dtype.kind == "f":
        if np.isnan(array).any():
            raise BaPipeError(f"{name} must be numbers, got NaN; measure the missing ones")
        array = np.ceil(np.clip(array, -1.0, float(UNLIMITED)))
    return np.minimum(array.astype(np.int64), UNLIMITED)


def _check(problem: Problem) -> None:
    if problem.forward.ndim != 2 or problem.forward.size == 0:
        raise BaPipeError(f"forward must be [type, layer], got shape {problem.forward.shape}; give every layer")
    types, layers = problem.forward.shape
    shapes: dict[str, tuple[int, ...]] = {
        **dict.fromkeys(("backward", "update"), (types, layers)),
        **dict.fromkeys(("counts", "capacity", "overhead"), (types,)),
        **dict.fromkeys(("send_forward", "send_backward"), (layers - 1,)),
        **dict.fromkeys(("weights_bytes", "saved_bytes", "input_bytes", "gradient_bytes"), (layers,)),
    }
    for name, shape in shapes.items():
        got = getattr(problem, name).shape
        if got != shape:
            raise BaPipeError(f"{name} must have shape {shape}, got {got}; match it to forward")
    for name in (*_FLOATS, *_INTS):
        values = getattr(problem, name)
        if not (values >= 0).all():
            raise BaPipeError(f"{name} must not be negative or NaN, got {values.min()}; correct the profile")
        if name in _FLOATS and not name.startswith("send") and not np.isfinite(values).all():
            raise BaPipeError(f"{name} must be finite, got inf; correct the profile")
    n = problem.accelerators
    if n < 1:
        raise BaPipeError(f"counts must hold an accelerator, got {problem.counts.tolist()}; add one")
    if problem.microbatches < 1:
        raise BaPipeError(f"microbatches must be at least 1, got {problem.microbatches}; raise it")
    if problem.max_replicas < 1:
        raise BaPipeError(f"max_replicas must be at least 1, got {problem.max_replicas}; 1 means none")
    if problem.inflight.shape != (max(n + 1, len(problem.inflight)),):
        raise BaPipeError(f"inflight must have {n + 1} entries, got {problem.inflight.shape}; index it by d")
    rates = problem.max_replicas + 1
    if problem.reduce_rate.shape != (max(rates, len(problem.reduce_rate)),):
        raise BaPipeError(f"reduce_rate must have {rates} entries, got {problem.reduce_rate.shape}; index it by r")
    if problem.recompute not in ("never", "allowed", "always"):
        raise BaPipeError(f"recompute must be never, allowed or always, got {problem.recompute!r}; choose one")
    if problem.count_communication not in ("overlapped", "exposed"):
        raise BaPipeError(
            f"count_communication must be overlapped or exposed, got {problem.count_communication!r}; choose one"
        )
    if problem.num_stages is not None and (problem.num_stages < 1 or problem.max_replicas > 1):
        raise BaPipeError(
            f"num_stages counts stages of one accelerator and must be at least 1, got {problem.num_stages} with "
            f"max_replicas {problem.max_replicas}; leave one of them out"
        )
    if problem.order is not None:
        object.__setattr__(problem, "order", tuple(int(item) for item in problem.order))
        got = tuple(problem.order.count(item) for item in range(types))
        if len(problem.order) != n or got != tuple(problem.counts.tolist()):
            raise BaPipeError(
                f"order must name each of the {problem.counts.tolist()} accelerators of each type once, got "
                f"{got} of {len(problem.order)}; match it to counts"
            )
    heaviest = int(problem.weights_bytes.sum()) + int(problem.overhead.max())
    inflight = min(problem.microbatches, int(problem.inflight.max())) * (
        float(problem.saved_bytes.sum()) + float(problem.input_bytes.max())
    )
    if heaviest + inflight > 2**62:
        raise BaPipeError(
            f"bytes of all layers must stay under 2**62, got {heaviest + inflight:.3g}; check the units"
        )
