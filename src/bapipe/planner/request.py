"""What is asked of the planner, and the sizes it may try."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from bapipe.costs.profile import Profile
from bapipe.errors import BaPipeError, nearest
from bapipe.hardware.cluster import Cluster
from bapipe.planner.effort import check_effort

__all__ = [
    "SCHEDULE_NAMES",
    "STRATEGIES",
    "Request",
    "default_global_batch",
    "microbatch_sizes",
    "profiled_range",
]

STRATEGIES = ("exact", "bapipe", "uniform", "parameters", "time", "pipedream", "gpipe", "dp")
"""how stages are cut: the optimum, the paper's steps, or a baseline's rule; gpipe and dp also fix the schedule"""
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
    """a pipeline of so many stages without replicas"""
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
    """how much is simulated to find a faster plan: low, normal or high, or so many seconds"""
    dealing: Literal["speed", "equal"] = "speed"
    """speed: replicas of several types may take micro-batches by their speed; equal: all replicas take as many"""
    compiled: bool = False
    """whether the plan's stages run compiled though the profile was not measured so"""

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
        if self.dealing not in ("speed", "equal"):
            raise BaPipeError(f"--dealing is speed or equal, got '{str(self.dealing)[:40]}'; give one of them")
        if self.schedule == "data-parallel" and self.stages not in (None, 1):
            raise BaPipeError(f"data parallelism has one stage, --stages says {self.stages}; drop one of them")
        if self.cap is not None:
            self._check_cap()
            object.__setattr__(self, "schedule", "1f1b")

    def _check_cap(self) -> None:
        if self.schedule not in (None, "1f1b"):
            raise BaPipeError(
                f"--in-flight belongs to the schedule 1f1b; {self.schedule} sets its own K per stage; drop one"
            )
        if self.strategy in ("gpipe", "dp"):
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
