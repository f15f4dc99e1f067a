"""What Table III rests on: PipeDream's profiles, and a link rate fitted to data parallelism alone.

The paper gives no times. Its one absolute hint is how much data parallelism loses at B = 32 against B = 64: with
c_B the compute of a batch and A the all-reduce, r = (c64 + A) / 2(c32 + A), so A/c32 = (k − 2r) / (2r − 1) with
k = c64/c32. A ring that does not overlap moves 2(N−1)/N of the weights at β bytes/s per GPU; VGG-16's r on 4 and
on 8 GPUs gives β(4) and β(8). Every other figure is predicted with these two, for all models.
"""

from __future__ import annotations

import functools
import importlib.resources
from dataclasses import replace

from bapipe.costs.fields import Rows
from bapipe.costs.pipedream_graph import PIPEDREAM_ACCELERATOR, scaled_profile
from bapipe.costs.profile import Profile, read_profile
from bapipe.costs.segments import Chain, make_chain
from bapipe.hardware.cluster import Cluster, Link
from bapipe.hardware.cluster_file import read_cluster
from bapipe.planner.candidate import Hardware
from bapipe.reproduce.paper_figures import TABLE3
from bapipe.reproduce.table_cells import Constant

__all__ = [
    "SEQUENCE",
    "SIZES",
    "link_rate",
    "model_chain",
    "model_profile",
    "pipeline_bound",
    "table3_constants",
    "v100_hardware",
]

SIZES = (32, 64)
"""B in Table III"""
SEQUENCE = 50
"""tokens of a GNMT sentence"""
_PROFILED_SEQUENCE = 48
_REFERENCE = "vgg16"
"""the only model whose row has data parallelism at two batch sizes"""


@functools.cache
def model_profile(model: str) -> Profile:
    """PipeDream's profile of vgg16, resnet50 or gnmt-8, scaled to B = 32 and 64 and to sentences of 50."""
    with importlib.resources.as_file(
        importlib.resources.files("bapipe.reproduce") / "data" / f"{model}.json"
    ) as path:
        profile = read_profile(path)
    if model.startswith("gnmt"):
        profile = _longer(profile, SEQUENCE / _PROFILED_SEQUENCE)
    return scaled_profile(profile, SIZES)


def _longer(profile: Profile, factor: float) -> Profile:
    """Sentences longer by `factor`: time and bytes of an LSTM grow with its steps."""

    def grown(rows: Rows) -> Rows:
        return tuple(tuple(value * factor for value in row) for row in rows)

    table = profile.accelerators[PIPEDREAM_ACCELERATOR]
    table = replace(
        table,
        forward=grown(table.forward),
        backward=grown(table.backward),
        boundary_forward=grown(table.boundary_forward),
        boundary_backward=grown(table.boundary_backward),
        saved_activations=grown(table.saved_activations),
    )
    return replace(profile, accelerators={PIPEDREAM_ACCELERATOR: table})


def model_chain(model: str, size: int) -> Chain:
    """The model's layers at one micro-batch size."""
    return make_chain(model_profile(model), (PIPEDREAM_ACCELERATOR,), size)


def _ratio(accelerators: int) -> float:
    """How fast data parallelism is at B = 32, B = 64 being 1, as printed."""
    run = next(run for run in TABLE3 if run.model == _REFERENCE and run.accelerators == accelerators)
    return run.data_parallel[32]


def link_rate(accelerators: int) -> float:
    """β: bytes/s per GPU, from the ratio that Table III prints for that many."""
    c32, c64 = (float(model_chain(_REFERENCE, size).work.sum()) for size in SIZES)
    ratio = _ratio(accelerators)
    reduce = c32 * (c64 / c32 - 2 * ratio) / (2 * ratio - 1)
    weights = float(model_chain(_REFERENCE, 64).weight_bytes.sum())
    return 2 * (accelerators - 1) / accelerators * weights / reduce


def v100_hardware(accelerators: int) -> Hardware:
    """So many V100s of 16 GB; a neighbour's link and the ring run at β, and nothing overlaps the all-reduce."""
    rate = link_rate(accelerators)
    cluster: Cluster = replace(
        read_cluster(f"{accelerators}xv100"),
        within=Link(bandwidth=rate, duplex="half"),
        collective_bandwidth=rate,
    )
    return Hardware(cluster=cluster, overlap_all_reduce=False)


def pipeline_bound(accelerators: int, microbatches: int, *, ratio: float | None = None) -> float:
    """The most that a pipeline of N stages can gain over data parallelism at B = 64: perfect cut, free links.

    (1 + A/c64) · M / (M + N − 1), with A/c64 = (1 − r) / (2r − 1), which supposes k = 2: a batch of 32 is as
    efficient as one of 64. Any loss at the smaller batch lowers it.
    """
    ratio = _ratio(accelerators) if ratio is None else ratio
    reduce = (1 - ratio) / (2 * ratio - 1)
    return (1 + reduce) * microbatches / (microbatches + accelerators - 1)


def table3_constants() -> tuple[Constant, ...]:
    """Everything that Table III is computed from."""
    rates = [
        Constant(
            name=f"β({count})",
            value=f"{link_rate(count) / 1e9:.3f} GB/s per GPU",
            source=f"DP at B=32 over B=64 is {_ratio(count):g} for VGG-16 on {count} V100; a ring that does not "
            "overlap; also the rate between neighbours, both directions sharing it",
            calibrated=True,
        )
        for count in (4, 8)
    ]
    return (
        *rates,
        Constant(
            name="layer times, sizes and weights",
            value="VGG-16 and ResNet-50 at batch 128, GNMT-8 at batch 32",
            source="PipeDream's published profiles of V100-class GPUs (msr-fiddle/pipedream, MIT licence); three "
            "misbooked entries of GNMT corrected, as the profile's description",
        ),
        Constant(
            name="time of B samples",
            value="(B+1)/(B0+1) of the profiled batch's",
            source="assumption: a batch costs one sample more than it has",
        ),
        Constant(
            name="T",
            value=f"{SEQUENCE} tokens",
            source="assumption: the usual longest sentence of GNMT; the profile has 48, its times and bytes are "
            "scaled by 50/48",
        ),
        Constant(name="memory", value="16 GB per GPU", source="the paper, section Experimental Setup"),
        Constant(name="M and B", value="as each cell has them", source="the paper, Table III"),
        Constant(
            name="PipeDream's planner",
            value="(compute + 4(m−1)/m · weights/β) / m per stage, 2 · activations/(β m') per cut",
            source="the optimizer its authors released (msr-fiddle/pipedream), transfers counted "
            "(--activation_compression_ratio 1)",
        ),
        Constant(
            name="links at a cut",
            value="one of β for each GPU of its narrower stage",
            source="assumption: a GPU sends and receives at β, with however many it talks",
        ),
    )
