"""Small CNNs and FPGA clusters for tests."""

from __future__ import annotations

from collections.abc import Sequence

from bapipe.hardware.cluster import Accelerator, AcceleratorType, Cluster, Link
from bapipe.models.layers import Layer, Model, Split

__all__ = ["board_type", "chain_of", "cluster_of", "conv_model"]

CLOCK = 250e6


def conv_model(shapes: Sequence[tuple[int, int, int, int, int]], *, name: str = "small") -> Model:
    """Convolutions one after another: (input channels, output channels, kernel, height, width) each."""
    layers = []
    first = shapes[0]
    arriving = float(first[0] * first[3] * first[4])
    for index, (inputs, outputs, kernel, height, width) in enumerate(shapes):
        weights = inputs * outputs * kernel**2
        layers.append(
            Layer(
                name=f"conv{index}",
                kind="conv",
                forward_flops=2.0 * weights * height * width,
                parameters=weights,
                output_elements=float(outputs * height * width),
                saved_elements=arriving,
                split=Split(channels=outputs) if outputs > 1 else None,
                conv=(inputs, outputs, kernel, height, width),
            )
        )
        arriving = float(outputs * height * width)
    return Model(name=name, layers=tuple(layers), input_elements=float(first[0] * first[3] * first[4]))


def board_type(
    name: str = "board",
    *,
    dsp: float = 1000,
    ram: float = 4e6,
    ddr: float = 1e9,
    ddr_bandwidth: float = 10e9,
    utilisation: float = 0.9,
    usable_ram: float = 1.0,
    macs: float = 1.0,
) -> AcceleratorType:
    board = {
        "dsp": dsp, "on_chip_bytes": ram, "clock": CLOCK, "macs_per_dsp_cycle": macs, "utilisation": utilisation,
        "usable_ram": usable_ram,
    }  # fmt: skip
    return AcceleratorType(
        name=name,
        kind="fpga",
        flops={"fp16": dsp * macs * 2 * CLOCK},
        memory=ddr,
        memory_bandwidth=ddr_bandwidth,
        execution="asynchronous",
        board=board,
    )


def chain_of(types: Sequence[AcceleratorType], *, link: float = 10e9) -> Cluster:
    """Boards cabled in this order; types of one name must be the same."""
    return Cluster(
        name="chain",
        accelerators=tuple(
            Accelerator(name=f"node0/{index}", type=kind.name, node="node0") for index, kind in enumerate(types)
        ),
        types={kind.name: kind for kind in types},
        within=Link(bandwidth=link),
        topology="chain",
    )


def cluster_of(count: int, *, link: float = 10e9, **figures: float) -> Cluster:
    return chain_of([board_type(**figures)] * count, link=link)  # type: ignore[arg-type]
