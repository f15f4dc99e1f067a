"""Plan: all that a run needs — cluster, partition, schedule — and what was predicted of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from bapipe.errors import BaPipeError
from bapipe.hardware.cluster import Cluster
from bapipe.hardware.precision import Precision, find_precision
from bapipe.io.decode import LARGEST_NUMBER
from bapipe.io.files import dump_json, read_versioned, unless_default, write_text
from bapipe.models.layers import ModelRef
from bapipe.records.fpga_deployment import Deployment
from bapipe.records.plan_consistency import require_consistent
from bapipe.schedule.schedule_file import ScheduleFile

__all__ = [
    "PLAN_SCHEMA",
    "Alternative",
    "Engine",
    "LayerPart",
    "LayerRun",
    "MemoryParts",
    "Plan",
    "PlanReplica",
    "PlanStage",
    "Prediction",
    "gap_over",
    "read_plan",
    "write_plan",
]

PLAN_SCHEMA = "bapipe.plan/1"
Engine = Literal["bapipe", "ddp", "fsdp"]
"""who runs a plan: BaPipe's own executor, or torch's DistributedDataParallel or FSDP2 (`fully_shard`)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPart:
    """The channels [start, stop) of a layer that is split between stages."""

    layer: int
    start: int
    stop: int
    of: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRun:
    """Consecutive layers that recompute together: they keep what enters the first of them."""

    first: int
    last: int
    """inclusive"""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryParts:
    """What fills a stage's fullest accelerator when it is fullest, all stages on it together; `memory_bytes`."""

    weights: float
    """every version that the schedule keeps, and what autocast casts of them while a global batch runs"""
    gradients: float
    """those that are there"""
    optimizer: float
    """its state"""
    activations: float
    """saved activations of in-flight micro-batches, and of those whose weight gradient is deferred"""
    buffers: float
    """messages under way"""
    workspace: float
    """workspace of the layer at work, or of the optimizer step, and what libraries keep"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReplica:
    """One replica of a stage whose replicas are of several types, or take unequal numbers of micro-batches."""

    microbatches: int
    """how many of a global batch it takes"""
    forward: float
    """seconds per micro-batch"""
    backward: float
    weight_gradient: float
    """seconds of the backward that are the weight gradient"""
    parting: float = 0.0
    """seconds more that it takes as a deferred weight gradient"""
    update: float = 0.0
    in_flight: float
    """in-flight micro-batches, at most"""
    memory_bytes: float
    """peak"""
    memory_capacity: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanStage:
    """One piece of the partition, what it costs, and where it runs."""

    accelerators: tuple[str, ...]
    """one name per replica"""
    first_layer: int
    last_layer: int
    """inclusive"""
    layers: tuple[str, ...]
    """names, first to last"""
    modules: tuple[str, ...] = ()
    """paths of the model's innermost modules that run in it, in order; (): not known"""
    tied: tuple[str, ...] = ()
    """layers of stages before whose weights a layer of this one shares"""
    fractions: tuple[LayerPart, ...] = ()
    """layers of which this stage has only a part"""
    recompute: bool = False
    """whether the whole stage does, as an action of its own before each backward"""
    recompute_layers: tuple[LayerRun, ...] = unless_default(())
    """layers whose forward is repeated in each backward, right before their own"""
    forward: float
    """seconds per micro-batch"""
    backward: float
    """with the forwards that are repeated in it"""
    repeated_forward: float = unless_default(0.0)
    """of the backward, seconds of these forwards"""
    weight_gradient: float
    """seconds of the backward that are the weight gradient; all of it at a first stage, which sends none on"""
    parting: float = 0.0
    """seconds more that it takes as a deferred weight gradient"""
    update: float = 0.0
    all_reduce: float = 0.0
    send_forward_bytes: float
    """per micro-batch to the next stage"""
    send_backward_bytes: float
    """per micro-batch to the previous stage"""
    sends_gradient: bool = True
    """False: nothing before the stage is trained, so that no gradient goes back to the previous stage"""
    weight_bytes: float
    trainable_bytes: float | None = None
    """of these, bytes of parameters that have a gradient and optimizer state; None: all of them"""
    memory_bytes: float
    """peak: weights, gradients, optimizer state, saved activations, workspace"""
    memory_capacity: float
    in_flight: float
    """in-flight micro-batches on each replica, at most"""
    saved_bytes: float | None = None
    """saved activations per in-flight micro-batch, received and sent values included; None: not known"""
    kept_bytes: float | None = None
    """per in-flight micro-batch where the stage recomputes, until it does"""
    delayed_bytes: float | None = None
    """per micro-batch from its input gradient to its weight gradient; None: as saved_bytes"""
    buffer_bytes: float | None = None
    """messages under way"""
    workspace_bytes: float | None = None
    """the largest workspace of a layer"""
    memory_parts: MemoryParts | None = None
    """what the peak is made of; None: not known"""
    replicas: tuple[PlanReplica, ...] | None = unless_default(None)
    """one per accelerator, where they are not alike; the figures above are then those of the slowest in each, and
    of the one with least memory to spare"""

    @property
    def recomputed(self) -> str:
        """What of it recomputes, in words; empty where nothing does."""
        count = sum(run.last - run.first + 1 for run in self.recompute_layers)
        if not count:
            return "recomputes" if self.recompute else ""
        return f"{count} of {self.last_layer - self.first_layer + 1} recompute{'s' * (count == 1)}"

    def on(self, accelerator: str) -> PlanStage | PlanReplica:
        """What is said of the stage on this accelerator: its replica's own, where replicas are not alike."""
        return self if self.replicas is None else self.replicas[self.accelerators.index(accelerator)]


def gap_over(lower_bound: float, time: float) -> float:
    """By how much a time is over its lower bound, as a share; never more than a file may say."""
    return min(time / lower_bound - 1, LARGEST_NUMBER)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What the simulator says of one global batch."""

    time: float
    throughput: float
    """samples per second"""
    bubble: float
    exposed_communication: float
    """seconds, on the rank that waits most"""
    lower_bound: float
    """seconds: perfect split of the global batch by equation (1), no communication"""
    gap: float
    """time / lower_bound − 1, by `gap_over`"""
    source: str
    """measured, analytic, …: where the profile's figures come from"""
    low: float | None = None
    """5th percentile of `time`, given how well layers and links are known; None: their errors are not known"""
    high: float | None = None
    """95th percentile likewise"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """Another way that was considered, and why it lost."""

    name: str
    time: float | None
    """seconds per global batch; None: it does not fit"""
    memory_bytes: float
    """on the fullest accelerator"""
    reason: str
    low: float | None = None
    """5th percentile of `time`, as in the prediction"""
    high: float | None = None
    """95th percentile likewise"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The cluster, the stages, the orders and the prediction; versioned as plan.json."""

    schema: str = PLAN_SCHEMA
    kind: Literal["pipeline", "data-parallel", "hybrid"]
    model: ModelRef
    profile_hash: str
    cluster: Cluster
    dtype: str
    """precision, by its word: fp32, tf32, bf16, fp16, bf16-mixed, fp16-mixed"""
    optimizer: str
    """name or class, and its options"""
    strategy: str
    microbatch_size: int
    microbatches: int
    global_batch: int
    stages: tuple[PlanStage, ...]
    schedule: ScheduleFile
    prediction: Prediction
    alternatives: tuple[Alternative, ...] = ()
    notes: tuple[str, ...] = field(default=())
    deployment: Deployment | None = None
    """what each FPGA is built with; None for other accelerators"""
    compiled: bool = False
    """whether its stages run compiled"""
    zero_stage: int = unless_default(0)
    """1: the replicas of a stage share its optimizer state (ZeRO-1); 0: each has all of it"""
    engine: Engine = unless_default("bapipe")  # noqa: RUF009 (a field)
    """who runs it"""
    units: tuple[str, ...] = unless_default(())
    """of FSDP2, paths of the modules that are sharded as one each; the model itself has the rest"""

    def __post_init__(self) -> None:
        if not self.stages:
            raise BaPipeError("a plan needs at least one stage; plan again")
        names = {accelerator.name for accelerator in self.cluster.accelerators}
        for index, stage in enumerate(self.stages):
            if not stage.accelerators:
                raise BaPipeError(f"stage {index} runs on no accelerator; plan again")
            unknown = [name for name in stage.accelerators if name not in names]
            if unknown:
                raise BaPipeError(f"stage {index} runs on '{unknown[0]}', which the cluster lacks; plan again")
        if len(self.stages) != self.schedule.stages:
            raise BaPipeError(
                f"the plan has {len(self.stages)} stages but its schedule {self.schedule.stages}; plan again"
            )

    @property
    def precision(self) -> Precision:
        """What the word of `dtype` means."""
        return find_precision(self.dtype)

    @property
    def ranks(self) -> tuple[str, ...]:
        """Accelerator of each rank: the stages' accelerators in order, each once."""
        return tuple(dict.fromkeys(name for stage in self.stages for name in stage.accelerators))

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from bapipe.reporting.html.notebook import plan_html

        return plan_html(self)


def read_plan(path: str | Path) -> Plan:
    """The one reader of plan.json; one whose parts contradict each other is refused (`require_consistent`)."""
    return read_versioned(Plan, path, schema=PLAN_SCHEMA, check=require_consistent)


def write_plan(plan: Plan, path: str | Path) -> None:
    """Write plan.json; the same plan gives the same bytes."""
    write_text(path, dump_json(plan))
