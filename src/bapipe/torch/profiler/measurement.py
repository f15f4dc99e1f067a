"""What was measured, before it becomes a profile: frozen values that go to the cache and back. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from bapipe.io.files import read_versioned
from bapipe.models.layers import Split
from bapipe.torch.profiler.statistics import SampleSummary, middle, pooled

__all__ = [
    "MEASUREMENT_SCHEMA",
    "Environment",
    "MeasuredLayer",
    "Measurement",
    "OptimizerBytes",
    "OptimizerTiming",
    "PartTiming",
    "Reading",
    "Repeats",
    "SizeMemory",
    "UnitTiming",
    "WholeStep",
    "read_measurement",
    "seconds",
]

MEASUREMENT_SCHEMA = "bapipe.measurement/3"


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """Where it was measured; all of it is part of the cache's key."""

    device: str
    """cpu or cuda"""
    name: str
    """of the device, as its driver tells it"""
    torch: str
    threads: int
    driver: str = ""
    slice: str = ""
    """part of a GPU under CUDA MPS, and what ran beside it; empty: the whole device"""
    compiled: bool = False
    """whether layers ran compiled"""

    def __str__(self) -> str:
        parts = [self.name, self.slice, f"{self.threads} threads", f"torch {self.torch}"]
        parts += [f"driver {self.driver}" if self.driver else "", "layers compiled" if self.compiled else ""]
        return ", ".join(part for part in parts if part)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredLayer:
    """What is known of a layer without measuring."""

    name: str
    parameters: int
    weight_bytes: float
    shares_weights_with: str | None = None
    split: Split | None = None
    trainable_bytes: float | None = None
    """of its weights, tied ones included, bytes of parameters that require a gradient; None: no parameter of the
    model is frozen"""
    modules: tuple[str, ...] = ()
    """paths of the innermost modules whose operations it has, in order"""

    @property
    def trained(self) -> bool:
        """Whether it has weight gradients."""
        return self.parameters > 0 if self.trainable_bytes is None else self.trainable_bytes > 0

    @property
    def steps_weights(self) -> bool:
        """Whether an optimizer step has work for it: tied weights are stepped with the layer that holds them."""
        return self.trained and self.shares_weights_with is None

    @property
    def stepped_bytes(self) -> float:
        """What an optimizer step works on."""
        if not self.steps_weights:
            return 0.0
        return self.weight_bytes if self.trainable_bytes is None else self.trainable_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeats:
    """How the measured layers stand for those of the whole model, where equal blocks are measured once."""

    layers: tuple[MeasuredLayer, ...]
    """of the model"""
    timed_as: tuple[tuple[int, ...], ...]
    """per layer of the model, the measured layers whose mean time it has"""
    weighed_as: tuple[int, ...]
    """per layer of the model, the measured layer whose bytes it has"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One thing's time."""

    host: SampleSummary
    """until the host had issued it; on a CPU until it was done"""
    device: SampleSummary | None = None
    """of a GPU, between events with the work queued ahead; None: the host's time is the time"""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitTiming:
    """A layer, or several too small to time alone, at one size in one round."""

    first: int
    last: int
    """included"""
    microbatch: int
    round: int
    forward: Reading
    backward: Reading
    """with gradients added to those that are there, as from the second micro-batch on"""
    input_gradient: Reading | None
    """the first part of a backward in two, for the received values alone; None: not taken apart, or nothing
    received has a gradient"""
    weight_gradient: Reading | None = None
    """the second part; None: likewise, or there are no weights"""
    delayed: float | None = None
    """bytes held between the two parts; None: likewise"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartTiming:
    """A layer in two parts, as two stages that divide it run it, at one size in one round."""

    layer: int
    microbatch: int
    round: int
    forward: tuple[Reading, Reading]
    """of the first half of its channels, and of the second with the join of both"""
    backward: tuple[Reading, Reading]
    whole_forward: Reading | None = None
    """of the layer itself; None: it is a unit of its own, whose timings say so"""
    whole_backward: Reading | None = None
    saved_activations: float | None = None
    """bytes that both parts keep beyond the whole layer, negative where they keep less; None: known from another
    round"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeMemory:
    """Bytes at one micro-batch size, one entry per layer."""

    microbatch: int
    boundary_forward: tuple[float, ...]
    boundary_backward: tuple[float, ...]
    saved_activations: tuple[float, ...]
    """each kept storage once in the whole model: a boundary value where it is received"""
    workspace: tuple[float, ...]
    """on top of all saved activations up to this layer, while it runs"""
    forward_workspace: tuple[float, ...] = ()
    """of these, while its forward runs, and below its backward; (): not distinguished"""
    backward_workspace: tuple[float, ...] = ()
    weight_workspace: tuple[float, ...] = ()
    """while deferred weight gradients are computed; (): not weighed"""
    library: tuple[float, ...] = ()
    """what libraries allocate when the layer runs first, and keep for all layers; (): not weighed"""
    passing_forward: tuple[float, ...] = ()
    """of the boundary, what the layer was given and only hands on; (): not known"""
    passing_backward: tuple[float, ...] = ()
    saved_before: tuple[float, ...] = ()
    """of the saved activations, what only the layer before saved; (): not known"""
    kept_input: tuple[float, ...] = ()
    """of what the layer received, what it saved itself; (): not known"""
    weight_casts: tuple[float, ...] = ()
    """copies of its weights that autocast keeps, whatever the size; (): there is no autocast"""


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeStep:
    """The whole model at one size in one round, to hold the sum of layers against."""

    microbatch: int
    round: int
    chain: SampleSummary
    """all layers as one stage, forward and backward, from idle to idle"""
    eager: SampleSummary
    """the module itself, likewise"""
    of_model: bool = True
    """of all layers of the model; False: of the measured ones alone, which stand for those that repeat them"""
    peak: float | None = None
    """most bytes the allocator gave out during the eager step; None: not on this device"""
    idle: float | None = None
    """of these, what was there before that neither weights, gradients nor inputs account for"""
    issue_forward: tuple[SampleSummary, ...] = ()
    """per unit, until the host had issued it for a GPU as one of a step's; (): not taken"""
    issue_backward: tuple[SampleSummary, ...] = ()
    issue_together: tuple[SampleSummary, SampleSummary] | None = None
    """forward and backward, until the host had issued all layers as one stage; None: not taken"""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerTiming:
    """The optimizer step of one layer in one round."""

    layer: int | None
    """None: of a single number, which is what any step takes beyond its work"""
    round: int
    reading: Reading


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerBytes:
    """What the optimizer needs beside weights and gradients, from a step of its own class."""

    parameters: int
    """numbers in the weights that it was weighed with"""
    state: float
    """bytes that it keeps between steps"""
    workspace: float
    """most bytes that a step has in temporary tensors"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """All that is known so far of one model on one device; `timings` may be incomplete."""

    schema: str = MEASUREMENT_SCHEMA
    model: str
    fingerprint: str
    shapes: tuple[str, ...]
    """of the example inputs at one sample"""
    dtype: str
    """precision, by its word"""
    optimizer: str
    environment: Environment
    layers: tuple[MeasuredLayer, ...]
    """that are measured"""
    repeats: Repeats | None = None
    """how they stand for the model's; None: they are the model's"""
    input_bytes: float
    """of one sample"""
    state_bytes: float
    """of all parameters and buffers, each once"""
    gradient_bytes: float
    """of the gradients of all trained parameters"""
    units: tuple[tuple[int, int], ...] = ()
    """(first, last) layer of each thing timed"""
    shares_forward: tuple[float, ...] = ()
    """per layer, its part of its unit's forward"""
    shares_backward: tuple[float, ...] = ()
    empty_forward: Reading | None = None
    """of a layer that does nothing: what timing one by one adds"""
    empty_backward: Reading | None = None
    empty_issue_forward: SampleSummary | None = None
    """of a layer that does nothing among others in a step: what issuing one by one adds; None: no GPU"""
    empty_issue_backward: SampleSummary | None = None
    timings: tuple[UnitTiming, ...] = ()
    memory: tuple[SizeMemory, ...] = ()
    whole: tuple[WholeStep, ...] = ()
    optimizer_steps: tuple[OptimizerTiming, ...] = ()
    optimizer_bytes: OptimizerBytes | None = None
    """None: not weighed, or nothing is trained"""
    parts: tuple[PartTiming, ...] = ()
    parts_not_fitting: tuple[int, ...] = ()
    """sizes at which the parts of a layer ran out of memory"""
    not_fitting: tuple[int, ...] = ()
    notes: tuple[str, ...] = field(default=())

    def sizes(self) -> tuple[int, ...]:
        """Micro-batch sizes for which every unit was timed at least once and memory is known."""
        weighed = {item.microbatch for item in self.memory} - set(self.not_fitting)
        timed = {(item.microbatch, item.first) for item in self.timings}
        return tuple(
            size
            for size in sorted(weighed)
            if all((size, first) in timed for first, _ in self.units) and self.units
        )

    def rounds(self, microbatch: int, first: int) -> list[UnitTiming]:
        """The timings of the unit that starts at that layer."""
        return [item for item in self.timings if item.microbatch == microbatch and item.first == first]

    def part_rounds(self, microbatch: int, layer: int | None = None) -> list[PartTiming]:
        """The timings of the layer's parts, or of all layers'."""
        return [item for item in self.parts if item.microbatch == microbatch and layer in (None, item.layer)]

    def with_parts(self, timing: PartTiming) -> Measurement:
        """The same with this timing, in place of one of the same layer, size and round."""

        def key(item: PartTiming) -> tuple[int, int, int]:
            return item.layer, item.microbatch, item.round

        return replace(self, parts=(*(item for item in self.parts if key(item) != key(timing)), timing))

    def without_parts(self, microbatch: int) -> Measurement:
        """The same with the note that parts do not fit at that size."""
        return replace(
            self,
            parts=tuple(item for item in self.parts if item.microbatch != microbatch),
            parts_not_fitting=tuple(sorted({*self.parts_not_fitting, microbatch})),
        )

    def step(self, microbatch: int, *, eager: bool = True) -> SampleSummary | None:
        """The whole step at that size, the middle one of all; None where it was not measured or did not fit."""
        found = [item.eager if eager else item.chain for item in self.whole if item.microbatch == microbatch]
        return middle(found) if found else None

    def issue(self, microbatch: int) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
        """Net seconds until the host had issued each unit in a step, forward and backward; None: not known."""
        found = [item for item in self.whole if item.microbatch == microbatch and item.issue_forward]
        if not found or self.empty_issue_forward is None or self.empty_issue_backward is None:
            return None
        ahead, back = self.empty_issue_forward.median, self.empty_issue_backward.median
        units = range(len(self.units))
        return (
            tuple(max(0.0, middle([item.issue_forward[unit] for item in found]).median - ahead) for unit in units),
            tuple(max(0.0, middle([item.issue_backward[unit] for item in found]).median - back) for unit in units),
        )

    def issue_together(self, microbatch: int) -> tuple[float, float] | None:
        """Seconds until the host had issued all layers as one stage, forward and backward; None: not known."""
        found = [item.issue_together for item in self.whole if item.microbatch == microbatch]
        known = [item for item in found if item is not None]
        if not known:
            return None
        forward, backward = ([item[way] for item in known] for way in (0, 1))
        return middle(forward).median, middle(backward).median

    def alike(self) -> tuple[tuple[int, ...], ...]:
        """Per layer of the model, the measured ones that compute the same."""
        return self.repeats.timed_as if self.repeats else tuple((layer,) for layer in range(len(self.layers)))

    def memory_at(self, microbatch: int) -> SizeMemory:
        """The bytes at that size, which must be among `sizes`."""
        return next(item for item in self.memory if item.microbatch == microbatch)


def seconds(readings: Sequence[Reading]) -> tuple[float, float | None]:
    """(host, device) medians over rounds; device None where any round has none."""
    host = pooled([item.host for item in readings]).median
    devices = [item.device for item in readings if item.device is not None]
    return host, pooled(devices).median if len(devices) == len(readings) else None


def read_measurement(path: str | Path) -> Measurement:
    """The one reader of a measurement."""
    return read_versioned(Measurement, path, schema=MEASUREMENT_SCHEMA)
