"""What is asked of the planner, and the sizes it may try."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from bapipe.costs.optimizers import is_elementwise
from bapipe.costs.profile import Profile
from bapipe.costs.profile_ways import Compiling
from bapipe.errors import BaPipeError, nearest
from bapipe.hardware.cluster import Cluster
from bapipe.planner.effort import check_effort

__all__ = [
    "ENGINES",
    "SCHEDULE_NAMES",
    "STRATEGIES",
    "Request",
    "default_global_batch",
    "microbatch_sizes",
    "profiled_range",
]

STRATEGIES = ("exact", "bapipe", "uniform", "parameters", "time", "pipedream", "gpipe", "dp", "ddp", "fsdp")
"""how stages are cut: the optimum, the paper's steps, or a baseline's rule; gpipe and dp also fix the schedule;
ddp and fsdp are data parallelism as torch's DistributedDataParallel and FSDP2 run it"""
ENGINES = ("ddp", "fsdp")
"""strategies that torch's own engines run"""
SCHEDULE_NAMES = (
    "1f1b-sno",
    "1f1b-so",
    "1f1b",
    "gpipe",
    "zb",
    "zb-h1",
    "zb-h2",
    "interleaved",
    "zb-v",
    "v-half",
    "v-min",
    "dualpipe-v",
    "pipedream",
    "1f1b-as",
    "fbp-as",
    "data-parallel",
)


_RECOMPUTE = ("auto", "never", "stages", "layers", "always")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What may be forced; None leaves it to the search."""

    global_batch: int | None = None
    """samples of one optimizer step, all accelerators together"""
    microbatch: int | None = None
    schedule: str | None = None
    cap: int | None = None
    """K, the in-flight micro-batches at the first stage; later ones hold fewer, as `declining_caps` has it. The
    schedule is then 1f1b, which alone has a K to choose"""
    stages: int | None = None
    """a pipeline of this many stages without replicas"""
    strategy: str = "exact"
    space: Literal["full", "paper"] = "full"
    """paper: N stages without replicas and recomputation, or data parallelism without accumulation"""
    optimizer: str | None = None
    """None: the one that the profile was measured with, or sgd"""
    split_layers: bool = False
    """whether the exact strategy may split a layer between two stages"""
    layer_error: float | None = None
    """relative standard error of a layer's time; None: as the profile's tables have it, 0 where they do not"""
    link_error: float | None = None
    """relative standard error of a transfer's time; None: as the cluster's links have it"""
    effort: str | float = "normal"
    """how much is simulated to find a faster plan: low, normal or high, or seconds"""
    dealing: Literal["speed", "equal"] = "speed"
    """speed: replicas of several types may take micro-batches by their speed; equal: all replicas take as many"""
    zero_stage: Literal["auto", "0", "1"] = "auto"
    """whether the replicas of a stage share its optimizer state (ZeRO-1): 1 all do, 0 none; auto: what is best"""
    engines: bool = True
    """whether torch's DDP or FSDP2 may be the plan where nobody asks for them"""
    compiled: Compiling = "auto"
    """whether the plan's stages run compiled, however the profile was measured; auto: as it was, and where it has
    both ways, as is faster"""
    recompute: str = "auto"
    """activation checkpointing: auto, where it makes a faster plan fit; never; stages, of whole stages only;
    layers, of layers only; always, of every layer; or of these layers by number, such as 0-3,7"""

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise BaPipeError(
                f"unknown strategy '{self.strategy[:40]}'{nearest(self.strategy, STRATEGIES)}; "
                f"known: {', '.join(STRATEGIES)}"
            )
        if self.schedule is not None and self.schedule not in SCHEDULE_NAMES:
            raise BaPipeError(
                f"unknown schedule '{self.schedule[:40]}'{nearest(self.schedule, SCHEDULE_NAMES)}; "
                f"known: {', '.join(SCHEDULE_NAMES)}"
            )
        renamed = {"global_batch": "global-batch", "microbatch": "micro-batch", "cap": "in-flight"}
        for name in ("global_batch", "microbatch", "cap", "stages"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise BaPipeError(f"--{renamed.get(name, name)} must be at least 1, got {value}; raise it")
        for name in ("layer_error", "link_error"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < 1:
                option = f"--{name.replace('_', '-')}"
                raise BaPipeError(f"{option} must be at least 0% and below 100%, got {value:.0%}; correct it")
        if self.global_batch and self.microbatch and self.global_batch % self.microbatch:
            raise BaPipeError(
                f"a global batch of {self.global_batch} is no multiple of a micro-batch of {self.microbatch}; "
                "change one"
            )
        check_effort(self.effort)
        if self.compiled not in (True, False, "auto"):
            raise BaPipeError(f"--compile is auto, yes or no, got '{str(self.compiled)[:40]}'; give one of them")
        if self.dealing not in ("speed", "equal"):
            raise BaPipeError(f"--dealing is speed or equal, got '{str(self.dealing)[:40]}'; give one of them")
        if self.zero_stage not in ("auto", "0", "1"):
            raise BaPipeError(f"--zero-stage is auto, 0 or 1, got '{str(self.zero_stage)[:40]}'; give one of them")
        if self.zero_stage == "1":
            self._check_sharded()
        alone = self.schedule in (None, "data-parallel") and self.stages in (None, 1)
        if self.strategy in ENGINES and not alone:
            raise BaPipeError(f"{self.strategy} has one stage and no schedule; drop --schedule and --stages")
        self._check_recompute()
        if self.schedule == "data-parallel" and self.stages not in (None, 1):
            raise BaPipeError(f"data parallelism has one stage, --stages says {self.stages}; drop one of them")
        if self.cap is not None:
            self._check_cap()
            object.__setattr__(self, "schedule", "1f1b")

    def _check_sharded(self) -> None:
        if self.schedule in ("pipedream", "1f1b-as", "fbp-as") or self.space == "paper":
            what = "the paper's space" if self.space == "paper" else self.schedule
            raise BaPipeError(f"{what} shares no optimizer states (ZeRO-1); give --zero-stage 0, or leave one out")
        if self.strategy in ENGINES:
            raise BaPipeError(f"{self.strategy} is run by torch, without ZeRO-1; leave --zero-stage out")
        if self.optimizer is not None and is_elementwise(self.optimizer) is False:
            raise BaPipeError(
                f"{self.optimizer[:60]} looks at more than one element of a weight at a time, so that its state "
                "cannot be sharded (ZeRO-1); give --zero-stage 0"
            )

    @property
    def whole_stages(self) -> bool:
        """Whether whole stages may recompute."""
        return self.recompute in ("auto", "stages")

    @property
    def chooses_layers(self) -> bool:
        """Whether the planner may choose layers that recompute."""
        return self.recompute in ("auto", "layers")

    def forced_layers(self, count: int) -> tuple[int, ...]:
        """Of `count` layers, those that recompute whatever the plan; raises BaPipeError for one that is none."""
        if self.recompute in _RECOMPUTE:
            return tuple(range(count)) if self.recompute == "always" else ()
        ranges = self._layer_ranges()
        for low, high in ranges:
            if high >= count:
                raise BaPipeError(
                    f"--recompute has layers {low} to {high}, the model has 0 to {count - 1}; correct it"
                )
        return tuple(sorted({layer for low, high in ranges for layer in range(low, high + 1)}))

    def _layer_ranges(self) -> list[tuple[int, int]]:
        found = []
        for part in self.recompute.split(","):
            first, _, last = part.strip().partition("-")
            if not first.isdigit() or not (last or first).isdigit() or int(first) > int(last or first):
                raise BaPipeError(
                    f"--recompute is {', '.join(_RECOMPUTE)} or layers by number such as 0-3,7, got "
                    f"'{self.recompute[:40]}'; correct it"
                )
            found.append((int(first), int(last or first)))
        return found

    def _check_recompute(self) -> None:
        forced = self.recompute == "always" or self.recompute not in _RECOMPUTE
        if self.recompute not in _RECOMPUTE:
            self._layer_ranges()
        if forced and (self.split_layers or self.space == "paper" or self.strategy == "bapipe"):
            other = "--split-layers" if self.split_layers else "--space paper"
            raise BaPipeError(
                f"--recompute {self.recompute[:40]} fixes which whole layers recompute, and "
                f"{'--strategy bapipe' if self.strategy == 'bapipe' else other} divides layers; leave one out"
            )

    def _check_cap(self) -> None:
        if self.schedule not in (None, "1f1b"):
            raise BaPipeError(
                f"--in-flight belongs to the schedule 1f1b; {self.schedule} sets its own K per stage; drop one"
            )
        if self.strategy in ("gpipe", "dp", *ENGINES):
            raise BaPipeError(
                f"--in-flight belongs to the schedule 1f1b, strategy {self.strategy} has its own; drop one of them"
            )
        if self.space == "paper":
            raise BaPipeError(
                "--in-flight belongs to the schedule 1f1b; the paper's space has 1f1b-sno and 1f1b-so, with K "
                "of N and 2N; leave --space paper or --in-flight out"
            )


def profiled_range(profile: Profile, cluster: Cluster) -> tuple[int, int, list[int]]:
    """Smallest and largest micro-batch that every accelerator type was profiled at, and the sizes between."""
    tables = [profile.table(name) for name in dict.fromkeys(item.type for item in cluster.accelerators)]
    low = max(table.microbatches[0] for table in tables)
    high = min(table.microbatches[-1] for table in tables)
    if low > high:
        raise BaPipeError(
            f"the profile of {profile.model.name} has no micro-batch size common to all accelerators; "
            "profile the same sizes on each"
        )
    sizes = {size for table in tables for size in table.microbatches if low <= size <= high}
    return low, high, sorted(sizes)


def default_global_batch(profile: Profile, cluster: Cluster, microbatch: int | None) -> int:
    """64 samples per accelerator, or 4 of the given (or only) micro-batches per accelerator if that is more."""
    low, _, _ = profiled_range(profile, cluster)
    per_accelerator = max(64, 4 * (microbatch or low))
    if microbatch:
        per_accelerator = -(-per_accelerator // microbatch) * microbatch
    elif per_accelerator % low:
        per_accelerator = -(-per_accelerator // low) * low
    return per_accelerator * len(cluster)


def microbatch_sizes(profile: Profile, cluster: Cluster, request: Request, global_batch: int) -> list[int]:
    """Micro-batch sizes to try: profiled ones and powers of two between them that divide the global batch."""
    low, high, sizes = profiled_range(profile, cluster)
    if request.microbatch is not None:
        profile.at(cluster.accelerators[0].type, request.microbatch)
        if global_batch % request.microbatch:
            raise BaPipeError(
                f"a global batch of {global_batch} is no multiple of a micro-batch of {request.microbatch}; "
                "change one"
            )
        return [request.microbatch]
    powers = [2**exponent for exponent in range(31) if low <= 2**exponent <= high]
    fitting = [size for size in sorted({*sizes, *powers}) if global_batch % size == 0]
    if not fitting:
        fitting = [size for size in range(low, min(high, global_batch) + 1) if global_batch % size == 0]
    if not fitting:
        raise BaPipeError(
            f"no profiled micro-batch of {low} to {high} divides a global batch of {global_batch}; "
            f"choose a multiple of {low}, such as {max(1, round(global_batch / low)) * low}"
        )
    return fitting
