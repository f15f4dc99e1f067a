"""A network's profile per board: what the paper's own partition steps, and every other tool, take."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bapipe.costs.profile import CostTable, Profile, ProfiledLayer
from bapipe.fpga.board import Board
from bapipe.fpga.cnn import Cnn
from bapipe.models.layers import ModelRef, Split

__all__ = ["fpga_profile"]


def fpga_profile(
    network: Cnn,
    boards: Sequence[Board],
    *,
    dtype: str,
    microbatches: Iterable[int] = (1,),
) -> Profile:
    """Seconds of every layer if it had all DSPs of a board to itself, in step with the others (fluid share).

    Layers are resident together, so such times add up to a stage's C under fluid allocation; whole tiles, DDR and
    fills depend on the stage and are added by `bapipe.fpga.stage_sizing`.
    """
    sizes = tuple(sorted(set(microbatches)))
    element = boards[0].element
    layers = network.layers
    tables = {}
    for board in dict.fromkeys(boards):
        once = [layer.macs / board.rate if layer.modules else 0.0 for layer in layers]
        errors = [time * ("EB" in layer.modules) for time, layer in zip(once, layers, strict=True)]
        tables[board.type] = CostTable(
            source="simulated",
            description=(
                f"FPDeep model: {board.dsp} DSPs · {board.macs_per_dsp:g} MAC · "
                f"{board.cycles_per_second / 1e6:g} MHz effective"
            ),
            microbatches=sizes,
            forward=tuple(tuple(b * time for time in once) for b in sizes),
            backward=tuple(tuple(b * (a + e) for a, e in zip(once, errors, strict=True)) for b in sizes),
            weight_gradient=tuple(tuple(b * time for time in once) for b in sizes),
            boundary_forward=tuple(tuple(b * layer.forward * element for layer in layers) for b in sizes),
            boundary_backward=tuple(tuple(b * layer.backward * element for layer in layers) for b in sizes),
            saved_activations=tuple(tuple(b * layer.kept * element for layer in layers) for b in sizes),
            update=(0.0,) * len(layers),
        )
    return Profile(
        model=ModelRef(name=network.name),
        dtype=dtype,
        layers=tuple(
            ProfiledLayer(
                name=layer.name,
                parameters=layer.weights,
                weight_bytes=float(layer.weights * element),
                split=Split(channels=layer.channels) if layer.channels > 1 else None,
            )
            for layer in layers
        ),
        accelerators=tables,
        input_bytes=float(network.input_elements * element),
    )
