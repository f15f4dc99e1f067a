"""What the paper prints: the figures of Tables III to VI with the row and column they stand at.

Tables I and II are formulas; `bapipe.schedule.closed_forms.paper_table_row` has them as printed.
"""

from __future__ import annotations

from dataclasses import dataclass

from bapipe.fpga import PAPER_SPEEDUP

__all__ = [
    "TABLE3",
    "TABLE4",
    "TABLE4_WEIGHTS",
    "TABLE5",
    "TABLE6",
    "PaperRun",
    "PipelineRun",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineRun:
    """GPipe's or BaPipe's part of a row of Table III."""

    microbatches: int
    """M"""
    size: int
    """B, the size of a micro-batch"""
    speedup: float
    schedule: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperRun:
    """A row of Table III: a model on a cluster, speedups over data parallelism at B = 64."""

    model: str
    title: str
    accelerators: int
    data_parallel: dict[int, float]
    """by B"""
    pipedream: dict[int, float]
    gpipe: PipelineRun | None
    """None: the row has 1x, as BaPipe chose data parallelism"""
    bapipe: PipelineRun | None

    @property
    def row(self) -> str:
        return f"{self.title}, {self.accelerators} V100"


TABLE3 = (
    PaperRun(
        model="vgg16",
        title="VGG-16",
        accelerators=4,
        data_parallel={32: 0.62, 64: 1.0},
        pipedream={32: 1.97, 64: 2.12},
        gpipe=PipelineRun(microbatches=8, size=32, speedup=1.95, schedule="GPipe"),
        bapipe=PipelineRun(microbatches=32, size=32, speedup=2.61, schedule="1F1B-SO"),
    ),
    PaperRun(
        model="vgg16",
        title="VGG-16",
        accelerators=8,
        data_parallel={32: 0.55, 64: 1.0},
        pipedream={32: 2.33, 64: 2.94},
        gpipe=PipelineRun(microbatches=8, size=32, speedup=1.77, schedule="GPipe"),
        bapipe=PipelineRun(microbatches=64, size=64, speedup=2.97, schedule="1F1B-SNO"),
    ),
    PaperRun(
        model="resnet50",
        title="ResNet-50",
        accelerators=4,
        data_parallel={64: 1.0},
        pipedream={64: 1.0},
        gpipe=None,
        bapipe=None,
    ),
    PaperRun(
        model="resnet50",
        title="ResNet-50",
        accelerators=8,
        data_parallel={64: 1.0},
        pipedream={64: 1.0},
        gpipe=None,
        bapipe=None,
    ),
    PaperRun(
        model="gnmt-8",
        title="GNMT-8",
        accelerators=4,
        data_parallel={64: 1.0},
        pipedream={64: 2.75},
        gpipe=PipelineRun(microbatches=8, size=64, speedup=2.93, schedule="GPipe"),
        bapipe=PipelineRun(microbatches=32, size=64, speedup=3.90, schedule="1F1B-SO"),
    ),
    PaperRun(
        model="gnmt-8",
        title="GNMT-8",
        accelerators=8,
        data_parallel={64: 1.0},
        pipedream={64: 2.37},
        gpipe=PipelineRun(microbatches=12, size=64, speedup=2.05, schedule="GPipe"),
        bapipe=PipelineRun(microbatches=64, size=64, speedup=3.21, schedule="1F1B-SO"),
    ),
)
"""Table III, top to bottom. ResNet-50's row gives no B; it is compared at B = 64, as the others."""

TABLE4 = {
    "DP": {1: 32, 2: 32, 4: 32, 8: 32},
    "PipeDream": {1: 32, 2: 32, 4: 32, 8: 32},
    "GPipe": {1: 32, 2: 42, 4: 60, 8: 74},
    "BaPipe": {1: 32, 2: 74, 4: 118, 8: 158},
}
"""Table IV: system -> accelerators -> largest L of GNMT-L in 16 GB each"""

TABLE4_WEIGHTS = {
    32: (445.6e6, 0.05e6),
    42: (550.6e6, 0.05e6),
    60: (739.5e6, 0.05e6),
    74: (886.4e6, 0.05e6),
    118: (1.35e9, 0.005e9),
    158: (1.78e9, 0.005e9),
}
"""Table IV: L -> W as printed, and half of its last digit"""

TABLE5 = {
    "vcu118": {"DSP Slices": 6840.0, "On-chip RAM(Mb)": 345.9, "GTY": 120.0, "GTM": 0.0, "DDR4 (GB/s)": 40.0},
    "vcu129": {"DSP Slices": 12288.0, "On-chip RAM(Mb)": 454.9, "GTY": 32.0, "GTM": 48.0, "DDR4 (GB/s)": 40.0},
}
"""Table V: board -> row -> figure; DDR4 is printed as ~40"""

TABLE6 = PAPER_SPEEDUP
"""Table VI: cluster -> speedup over data parallelism"""
