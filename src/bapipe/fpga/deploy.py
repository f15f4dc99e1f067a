"""From an outcome to what each board is built with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from bapipe.fpga.assumptions import SOURCES, Parameters
from bapipe.fpga.outcome import Outcome
from bapipe.fpga.placement import ddr_bytes
from bapipe.fpga.stage_sizing import Held, StageLoad, held_layers
from bapipe.fpga.tiling import tile_at
from bapipe.hardware.cluster import Cluster
from bapipe.records.fpga_deployment import BoardDeployment, Deployment, Fifo, LinkUse, Module, Placed

__all__ = ["assumptions", "deploy"]


def deploy(outcome: Outcome, cluster: Cluster) -> Deployment:
    """The deployment of a pipeline on the cluster's boards."""
    names = [item.name for item in cluster.accelerators[outcome.offset :]]
    boards = tuple(_board(outcome, index, names) for index in range(len(outcome.loads)))
    kind, index = outcome.binding
    what = f"link {names[index]} – {names[index + 1]}" if kind == "link" else f"{kind.upper()} of {names[index]}"
    return Deployment(boards=boards, binds=what, assumptions=assumptions(outcome.run.parameters, cluster))


def assumptions(parameters: Parameters, cluster: Cluster) -> dict[str, str]:
    """Every parameter and every figure of a board with its value and source, for --explain."""
    found = {name: f"{_plain(getattr(parameters, name))}: {source}" for name, source in SOURCES.items()}
    for name in dict.fromkeys(item.type for item in cluster.accelerators):
        kind = cluster.types[name]
        figures = ", ".join(f"{key} {value:g}" for key, value in kind.board.items())
        found[f"{name}.board"] = f"{figures}: {kind.sources.get('board', 'the cluster file')}"
        rate = f"{kind.memory_bandwidth / 1e9:g} GB/s"
        found[f"{name}.ddr"] = f"{rate}: {kind.sources.get('memory_bandwidth', 'the cluster file')}"
    return found


def _plain(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value).lower()


def _board(outcome: Outcome, index: int, names: Sequence[str]) -> BoardDeployment:
    load, run = outcome.loads[index], outcome.run
    board, b = load.board, outcome.rule.microbatch
    interval = outcome.period / b
    held = held_layers(run.units, load.first, load.stop)
    modules = tuple(_modules(held, load, run.parameters))
    macs = sum(item.layer.training_macs * item.share for item in held)
    hosted = sum(item.bytes for item in outcome.parked if item.host == index)
    state_on = float(load.demand.state) if board.ddr <= 0 else 0.0
    placed = load.spill
    return BoardDeployment(
        accelerator=names[index],
        type=board.type,
        compute=load.compute,
        ddr=load.ddr,
        ratio=load.ratio,
        interval=interval,
        binds=_binds(outcome, index, names),
        dsp_forward=float(sum(item.dsp for item in modules if item.module == "FP")),
        dsp_error=float(sum(item.dsp for item in modules if item.module == "EB")),
        dsp_gradient=float(sum(item.dsp for item in modules if item.module == "WG")),
        dsp_installed=board.dsp,
        efficiency=macs / (board.rate * interval),
        ram_weights=float(placed.weights_on),
        ram_gradients=float(placed.gradients_on),
        ram_features=float(placed.features_on),
        ram_hosted=float(hosted),
        ram_buffers=float(load.demand.buffers) + state_on,
        ram_usable=board.ram,
        ddr_used=float(placed.weights_off + placed.gradients_off + placed.features_off + placed.state_off),
        ddr_installed=board.ddr,
        ddr_rate=float(ddr_bytes(placed, run.parameters)) / interval,
        ddr_bandwidth=board.ddr_bandwidth,
        modules=modules,
        placed=tuple(_placed(outcome, index, held, names)),
        fifos=tuple(_fifos(held, board.element)),
        links=tuple(_links(outcome, index, names, interval)),
    )


def _modules(held: Sequence[Held], load: StageLoad, parameters: Parameters) -> Iterable[Module]:
    board = load.board
    cycles = load.compute * board.cycles_per_second
    total = sum(item.layer.training_macs * item.share for item in held)
    for item in held:
        macs = item.layer.macs * item.share
        for name in item.layer.modules:
            if parameters.allocation == "fluid" or item.geometry is None:
                sizes: tuple[int | None, int | None, int | None] = (None, None, None)
                dsp, taken = board.dsp * macs / total, cycles
            else:
                tile = tile_at(item.geometry, cycles, board.macs_per_dsp)
                assert tile is not None, "the interval was chosen so that every module has a tile"
                # EB reads gradients of output channels and makes those of input channels.
                sizes = (tile.tm, tile.tn, tile.tk) if name == "EB" else (tile.tn, tile.tm, tile.tk)
                dsp, taken = float(tile.dsp), float(tile.cycles)
            yield Module(
                layer=item.layer.name,
                module=name,  # type: ignore[arg-type]
                start=item.start,
                stop=item.stop,
                of=item.of,
                tn=sizes[0],
                tm=sizes[1],
                tk=sizes[2],
                dsp=dsp,
                cycles=taken,
                efficiency=macs / (dsp * board.macs_per_dsp * cycles) if dsp and cycles else 0.0,
            )


def _placed(outcome: Outcome, index: int, held: Sequence[Held], names: Sequence[str]) -> Iterable[Placed]:
    """Small layers on chip first, so that what spills is a few large ones."""
    load = outcome.loads[index]
    element, placed = load.board.element, load.spill
    weights = [(item.layer.name, item.layer.weights * item.share * element) for item in held]
    parked = [(names[item.host], item.bytes) for item in outcome.parked if item.stage == index]
    yield from _poured("weights", weights, [("on-chip", float(placed.weights_on)), *parked])
    yield from _poured("gradients", weights, [("on-chip", float(placed.gradients_on))])
    tensors = [
        (item.layer.name, (item.layer.input if at == 0 else item.layer.kept) * element * load.images)
        for at, item in enumerate(held)
    ]
    yield from _poured("features", tensors, [("on-chip", float(placed.features_on))])
    copies = outcome.run.copies
    if copies:
        where = "on-chip" if load.board.ddr <= 0 else "ddr"
        for name, size in weights:
            if size:
                yield Placed(layer=name, what="state", where=where, bytes=float(copies * size))


def _poured(what: str, sizes: Sequence[tuple[str, float]], rooms: Sequence[tuple[str, float]]) -> Iterable[Placed]:
    """Pour the layers, small ones first, into the rooms in turn; the rest goes to DDR."""
    left = dict(rooms)
    for name, size in sorted(sizes, key=lambda item: item[1]):
        rest = size
        for where, room in left.items():
            amount = min(rest, room)
            if amount > 1e-6:
                left[where] = room - amount
                rest -= amount
                yield Placed(layer=name, what=what, where=where, bytes=float(amount))  # type: ignore[arg-type]
        if rest > 1e-3:
            yield Placed(layer=name, what=what, where="ddr", bytes=float(rest))  # type: ignore[arg-type]


def _fifos(held: Sequence[Held], element: int) -> Iterable[Fifo]:
    for item in held:
        layer = item.layer
        if not layer.modules:
            continue
        for stream, rows, height, elements in (
            ("features", min(layer.kernel + 1, layer.rows), layer.rows, layer.input),
            ("errors", min(layer.kernel + 1, layer.height), layer.height, layer.output),
        ):
            size = rows * elements / height * element
            yield Fifo(layer=layer.name, stream=stream, rows=rows, bytes=float(size))  # type: ignore[arg-type]


def _links(outcome: Outcome, index: int, names: Sequence[str], interval: float) -> Iterable[LinkUse]:
    for other, cut, stream in ((index - 1, index - 1, "errors"), (index + 1, index, "features")):
        if not 0 <= other < len(outcome.loads):
            continue
        crossing, bandwidth = outcome.crossings[cut], outcome.run.links[cut].bandwidth
        sent = crossing.backward if stream == "errors" else crossing.forward
        hosted = sum(item.link_bytes for item in outcome.parked if item.host == index and item.stage == other)
        for what, amount in ((stream, sent), ("parked weights", hosted)):
            if amount > 0 or what != "parked weights":
                yield LinkUse(
                    to=names[other],
                    stream=what,  # type: ignore[arg-type]
                    image_bytes=float(amount),
                    rate=amount / interval,
                    bandwidth=bandwidth,
                )


def _binds(outcome: Outcome, index: int, names: Sequence[str]) -> str:
    load, rule = outcome.loads[index], outcome.rule
    found = {"DSP": float(rule.slots(load.fill)) * load.compute, "DDR": rule.microbatch * load.ddr}
    for other, cut in ((index - 1, index - 1), (index + 1, index)):
        if 0 <= other < len(outcome.loads):
            found[f"link to {names[other]}"] = outcome.crossings[cut].period
    return max(found, key=lambda name: np.nan_to_num(found[name], posinf=np.inf))
