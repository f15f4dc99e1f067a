"""BaPipe: find the fastest way to spread DNN training over your accelerators, see why, and run it.

    import bapipe

    plan = bapipe.plan("bert-large", "4xv100", global_batch=256)
    print(plan.prediction.time, [stage.layers for stage in plan.stages])
    bapipe.write_report(plan, "report.html")

The names below are the public API. Each is loaded when it is first used, so `import bapipe` is immediate and needs
neither torch nor a GPU; `profile` and `detect_cluster` import torch when they are called. Training by a plan is in
`bapipe.torch`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

__all__ = [
    "Action",
    "BaPipeError",
    "Cluster",
    "Comparison",
    "Costs",
    "Kind",
    "Model",
    "Network",
    "Plan",
    "Profile",
    "RunRecord",
    "Schedule",
    "Summary",
    "Timeline",
    "__version__",
    "check",
    "compare",
    "detect_cluster",
    "make_schedule",
    "plan",
    "profile",
    "read_cluster",
    "read_plan",
    "read_profile",
    "read_run",
    "read_schedule",
    "require_valid",
    "simulate",
    "summarise",
    "write_plan",
    "write_profile",
    "write_report",
    "write_schedule",
]

__version__ = "0.1.0"

if TYPE_CHECKING:
    from pathlib import Path

    from bapipe.analysis.predicted_measured import Comparison, compare
    from bapipe.costs.profile import Profile, read_profile, write_profile
    from bapipe.errors import BaPipeError
    from bapipe.hardware.cluster import Cluster
    from bapipe.hardware.cluster_file import read_cluster
    from bapipe.models.layers import Model
    from bapipe.records.plan import Plan, read_plan, write_plan
    from bapipe.records.run_record import RunRecord, read_run
    from bapipe.reporting.html.write_report import write_report
    from bapipe.schedule.actions import Action, Kind, Schedule
    from bapipe.schedule.generators import make_schedule
    from bapipe.schedule.schedule_file import read_schedule, write_schedule
    from bapipe.schedule.validate import check, require_valid
    from bapipe.simulator.action_costs import Costs
    from bapipe.simulator.lowering import Network
    from bapipe.simulator.simulate import simulate
    from bapipe.simulator.summary import Summary, summarise
    from bapipe.simulator.timeline import Timeline

_HOME = {
    "bapipe.analysis.predicted_measured": ("Comparison", "compare"),
    "bapipe.costs.profile": ("Profile", "read_profile", "write_profile"),
    "bapipe.errors": ("BaPipeError",),
    "bapipe.hardware.cluster": ("Cluster",),
    "bapipe.hardware.cluster_file": ("read_cluster",),
    "bapipe.models.layers": ("Model",),
    "bapipe.records.plan": ("Plan", "read_plan", "write_plan"),
    "bapipe.records.run_record": ("RunRecord", "read_run"),
    "bapipe.reporting.html.write_report": ("write_report",),
    "bapipe.schedule.actions": ("Action", "Kind", "Schedule"),
    "bapipe.schedule.generators": ("make_schedule",),
    "bapipe.schedule.schedule_file": ("read_schedule", "write_schedule"),
    "bapipe.schedule.validate": ("check", "require_valid"),
    "bapipe.simulator.lowering": ("Network",),
    "bapipe.simulator.action_costs": ("Costs",),
    "bapipe.simulator.simulate": ("simulate",),
    "bapipe.simulator.summary": ("Summary", "summarise"),
    "bapipe.simulator.timeline": ("Timeline",),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}


def plan(
    model: str | Path | Profile,
    cluster: str | Path | Cluster,
    *,
    global_batch: int | None = None,
    micro_batch: int | None = None,
    schedule: str | None = None,
    stages: int | None = None,
    optimizer: str | None = None,
    precision: str | None = None,
    split_layers: bool = False,
    dealing: Literal["speed", "equal"] = "speed",
    zero_stage: Literal["auto", "0", "1"] = "auto",
    recompute: str = "auto",
    strategy: str = "exact",
) -> Plan:
    """Find the fastest way to train a model on a cluster.

    `model` is a built-in name, the path of a profile.json, a layer table (.toml) or PipeDream's graph.txt, or a
    `Profile`. `cluster` is a shorthand such as "4xv100" or "2xa100+2xv100", the path of a .toml file, or a
    `Cluster`. `global_batch` is the number of samples of one optimizer step (default: 64 per accelerator). A given
    `micro_batch`, `schedule` or number of `stages` is kept, else the best is chosen. `precision` is fp32, tf32,
    bf16, fp16, bf16-mixed or fp16-mixed, by default the profile's own, or fp32 where costs are computed here. The
    `optimizer`, such as "adamw" or "adamw(fused=true)", is by default the one that the profile was measured with,
    or sgd. With `split_layers` two stages may share a layer. `dealing` "equal" gives all replicas of a stage as
    many micro-batches, where by default those of several types may take them by their speed. `recompute` is auto,
    never, stages, layers, always, or layers by number such as "0-3,7": what may repeat its forward to save memory.
    `zero_stage` "1" has the replicas of a stage share its optimizer state (ZeRO-1), "0" has not.

    Raises `BaPipeError`, with what to do, if nothing fits or an argument is wrong.
    """
    from bapipe.costs.profile import Profile
    from bapipe.costs.resolve_model import of_precision
    from bapipe.hardware.cluster import Cluster
    from bapipe.hardware.cluster_file import read_cluster
    from bapipe.planner import Request, explore, make_plan
    from bapipe.planner.inputs import FPGA_DTYPE, goes_on_fpgas, layers_for_fpgas, profile_for

    request = Request(
        global_batch=global_batch,
        microbatch=micro_batch,
        schedule=schedule,
        stages=stages,
        strategy=strategy,
        optimizer=optimizer,
        split_layers=split_layers,
        dealing=dealing,
        zero_stage=zero_stage,
        recompute=recompute,
    )
    hardware = cluster if isinstance(cluster, Cluster) else read_cluster(str(cluster))
    if isinstance(model, Profile):
        return make_plan(explore(of_precision(model, precision), hardware, request))
    if goes_on_fpgas(str(model), hardware):
        from bapipe.fpga import explore_fpga, make_fpga_plan

        layers = layers_for_fpgas(str(model))
        return make_fpga_plan(explore_fpga(layers, hardware, request, dtype=precision or FPGA_DTYPE))
    costs = profile_for(str(model), hardware, microbatch=micro_batch, precision=precision)
    return make_plan(explore(costs, hardware, request))


def profile(
    model: Any,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    micro_batches: Sequence[int] = (1, 2, 4, 8),
    device: str = "cpu",
    precision: str = "fp32",
    optimizer: str = "sgd",
    accelerator: str | None = None,
    threads: int = 1,
    compiled: bool | Literal["auto"] = False,
) -> Profile:
    """Measure what every layer of a model costs on a device of this machine. Imports torch.

    `model` is an `nn.Module`, with an example of its inputs in `args` and `kwargs`, or the name of a built-in
    model or of a `package.module:function`, with that function's arguments in `kwargs`. The costs are filed under
    `accelerator`, by default the catalogue's name of the device; a cluster must have accelerators of that type.
    `precision` is fp32, tf32, bf16, fp16, bf16-mixed or fp16-mixed: layers are measured as a run executes them in
    it, and plans made from the profile train in it. `threads` are those of a CPU rank. `compiled`: layers are
    measured as torch.compile makes them, and plans made from the profile run them so; "auto": they are measured
    both ways, and plans run them as is faster.
    """
    from bapipe.models.layers import ModelRef
    from bapipe.torch.profiler import MeasureSettings, profile_model, profile_module

    settings = MeasureSettings(microbatches=tuple(sorted(set(micro_batches))))
    common: dict[str, Any] = {
        "settings": settings,
        "device": device,
        "precision": precision,
        "optimizer": optimizer,
        "accelerator": accelerator,
        "threads": threads if device == "cpu" else None,
        "compile_": compiled,
    }
    if isinstance(model, str):
        return profile_model(model, args=dict(kwargs or {}), **common).profile
    reference = ModelRef(name=type(model).__name__)
    return profile_module(model, tuple(args), dict(kwargs or {}), model=reference, **common).profile


def detect_cluster(*, ranks: int | None = None, threads: int = 1) -> Cluster:
    """The cluster that this machine is: its GPUs, or its CPU as `ranks` of `threads` threads. Imports torch.

    Compute and memory rates are measured in under two seconds. Links are not: `bapipe profile --links` does that.
    """
    from bapipe.hardware.cluster_file import parse_cluster
    from bapipe.torch.profiler.detect_machine import cluster_text, detect

    return parse_cluster(cluster_text(detect(ranks=ranks, threads=threads)), where="this machine")


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'bapipe' has no attribute '{name}'")
    value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
