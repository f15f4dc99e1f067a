"""The paper's Table VI: BaPipe's batch time beside data parallelism's, for ResNet-50 on three clusters.

A calibration, not a validation: clock · utilisation was fitted so that the ratios come out near the paper's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from bapipe.fpga.assumptions import Parameters
from bapipe.fpga.explore_fpga import explore_fpga
from bapipe.hardware.cluster import Cluster
from bapipe.hardware.cluster_file import read_cluster
from bapipe.models.builtin import builtin_model
from bapipe.planner.request import Request

__all__ = ["PAPER_SPEEDUP", "Table6Row", "table6"]

PAPER_SPEEDUP = {"4xvcu118": 1.00, "2xvcu129+2xvcu118": 1.05, "4xvcu129": 1.14}
"""cluster -> speedup over data parallelism that Table VI prints"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table6Row:
    """One cluster of Table VI."""

    cluster: str
    paper: float
    """the paper's speedup over data parallelism"""
    schedule: str
    microbatch: int
    time: float
    """seconds per global batch of the pipeline"""
    data_parallel: dict[str, float] = field(default_factory=dict)
    """variant -> seconds per global batch"""
    ratio: dict[str, float] = field(default_factory=dict)
    """board type -> ρ = D/C under data parallelism as paper-ddr"""
    binds: str = ""
    """what sets the pipeline's interval: dsp, ddr, link"""

    @property
    def speedup(self) -> float:
        """Over data parallelism as the paper describes it (weights in DDR)."""
        return self.data_parallel["paper-ddr"] / self.time


def table6(
    parameters: Parameters | None = None,
    *,
    change: Callable[[Cluster], Cluster] | None = None,
    strategy: str = "exact",
) -> tuple[Table6Row, ...]:
    """All three clusters with one set of parameters; `change` alters each cluster first (for sensitivity)."""
    model = builtin_model("resnet50", granularity="conv")
    rows = []
    for spec, paper in PAPER_SPEEDUP.items():
        cluster = read_cluster(spec)
        cluster = change(cluster) if change is not None else cluster
        found = explore_fpga(model, cluster, Request(global_batch=128, strategy=strategy), parameters=parameters)
        reference = next(item for item in found.alternatives if item.variant == "paper-ddr")
        rows.append(
            Table6Row(
                cluster=spec,
                paper=paper,
                schedule=found.best.rule.schedule,
                microbatch=found.best.rule.microbatch,
                time=found.best.time,
                data_parallel={item.variant: item.time for item in found.alternatives if item.time is not None},
                ratio={item.type: item.ratio for item in reference.replicas},
                binds=" and ".join(found.best.bound_by),
            )
        )
    return tuple(rows)
