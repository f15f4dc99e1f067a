"""What if: the same question asked of clusters that differ in one figure or two, and what binds on each side."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bapipe.costs.profile import Profile
from bapipe.costs.profile_ways import each_way
from bapipe.errors import BaPipeError, InfeasibleError, nearest
from bapipe.fpga import Parameters, explore_fpga
from bapipe.hardware.cluster import Accelerator, AcceleratorType, Cluster, Link
from bapipe.hardware.cluster_file import MAX_ACCELERATORS, with_link_bandwidth
from bapipe.models.layers import Model
from bapipe.planner import Request, explore
from bapipe.units import format_bandwidth, format_bytes, parse_bandwidth, parse_bytes

__all__ = [
    "BOARD_FIGURES",
    "CLUSTER_FIGURES",
    "MOST_POINTS",
    "WORTH",
    "Point",
    "Sweep",
    "SweepAnswer",
    "WhatIf",
    "changed",
    "fpga_answers",
    "gpu_answers",
    "parse_sweep",
    "sweep_cluster",
]

BOARD_FIGURES = ("dsp", "clock", "ram", "utilisation", "usable_ram", "ddr", "memory")
"""after a type's name, or after "board" for all types"""
CLUSTER_FIGURES = ("link", "memory", "count", "ddr")
MOST_POINTS = 200
_GAIN = 2.0
"""by how much each resource is improved in turn; less may fall between two places to cut and show nothing"""
WORTH = 0.02
"""share of the time that twice as much of a resource must save for it to bind"""
_RANGE = re.compile(r"(.+?)\.\.(.+)")
_UNIT = re.compile(r"\s*[0-9.]+(?:[eE][+-]?[0-9]+)?\s*(.*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """A figure and the values it takes."""

    name: str
    """`link`, `memory`, `count`, `ddr`, `board.dsp`, `vcu129.ram`…"""
    values: tuple[float, ...]
    """SI units, increasing"""
    labels: tuple[str, ...]
    """as people write them"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepAnswer:
    """What planning one cluster says."""

    time: float | None
    """seconds per global batch; None: nothing fits"""
    plan: str
    """in a few words, or why nothing fits"""
    gains: dict[str, float] = field(default_factory=dict)
    """resource -> share of the time that twice as much of it saves; empty where that was not asked"""

    @property
    def binding(self) -> dict[str, float]:
        """The resources that bind, by what more of them saves, most first."""
        worth = {name: gain for name, gain in self.gains.items() if gain >= WORTH}
        return dict(sorted(worth.items(), key=lambda item: -item[1]))

    @property
    def binds(self) -> str:
        """What binds, and what else saves at least half as much; empty where that was not asked."""
        if self.time is None:
            return "memory"
        most = max(self.gains.values(), default=0.0)
        leading = [name for name, gain in self.binding.items() if gain >= most / 2]
        return " and ".join(leading) or ("nothing alone" if self.gains else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One cluster of the sweep."""

    at: tuple[int, ...]
    """index of the value of each sweep"""
    answer: SweepAnswer


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """All points of one sweep or of the grid of two."""

    sweeps: tuple[Sweep, ...]
    points: tuple[Point, ...]

    def answer(self, *at: int) -> SweepAnswer:
        return next(point.answer for point in self.points if point.at == at)


def parse_sweep(text: str, *, points: int = 7) -> Sweep:
    """`name=low..high` in `points` even steps, or `name=a,b,c`; a unit after the last value holds for all.

    board.dsp=4000..16000   link=50..500Gb/s   memory=8,16,32GB   count=1..8
    """
    name, separator, given = (part.strip() for part in text.partition("="))
    if not separator or not given:
        raise BaPipeError(f"a sweep looks like link=50..500Gb/s or memory=8,16,32GB, got '{text[:60]}'")
    figure = _figure(name)
    match = _RANGE.fullmatch(given)
    parts = list(match.groups()) if match else given.split(",")
    unit = _UNIT.fullmatch(parts[-1])
    suffix = unit[1] if unit else ""
    written = [part.strip() if _has_unit(part) else part.strip() + suffix for part in parts]
    numbers = [_number(figure, part, what=f"--sweep {name}") for part in written]
    if match:
        if not numbers[0] < numbers[1]:
            raise BaPipeError(f"--sweep {name}: {given[:40]} must go up; exchange its ends")
        if not 2 <= points <= MOST_POINTS:
            raise BaPipeError(f"--points must be from 2 to {MOST_POINTS}, got {points}")
        step = (numbers[1] - numbers[0]) / (points - 1)
        numbers = [numbers[0] + index * step for index in range(points)]
        if figure in ("count", "dsp"):
            numbers = sorted({float(round(number)) for number in numbers})
    if len(numbers) > MOST_POINTS or any(not number > 0 for number in numbers):
        raise BaPipeError(f"--sweep {name} needs 1 to {MOST_POINTS} values of more than 0, got {given[:40]}")
    values = tuple(sorted(set(numbers)))
    return Sweep(name=name, values=values, labels=tuple(_label(figure, value, suffix) for value in values))


def _has_unit(text: str) -> bool:
    found = _UNIT.fullmatch(text)
    return bool(found and found[1])


def _figure(name: str) -> str:
    """The figure's own name: after the dot of board.dsp or vcu118.dsp, or a cluster's."""
    prefix, dot, figure = name.rpartition(".")
    known = BOARD_FIGURES if dot else CLUSTER_FIGURES
    if figure not in known or (dot and not prefix):
        names = [*CLUSTER_FIGURES, *(f"board.{item}" for item in BOARD_FIGURES)]
        raise BaPipeError(f"unknown figure '{name[:60]}'{nearest(name, names)}; sweep one of {', '.join(names)}")
    return figure


def _number(figure: str, text: str, *, what: str) -> float:
    if figure in ("link", "ddr"):
        return parse_bandwidth(text, what=what)
    if figure in ("memory", "ram"):
        return parse_bytes(text, what=what)
    match = re.fullmatch(r"\s*([0-9.]+(?:[eE][+-]?[0-9]+)?)\s*([kMG]?Hz)?\s*", text)
    scale = {"Hz": 1.0, "kHz": 1e3, "MHz": 1e6, "GHz": 1e9, None: 1.0}
    if not match or (match[2] and figure != "clock"):
        raise BaPipeError(f"{what} must be a number, got '{text[:40]}'")
    number = float(match[1]) * scale[match[2]]
    if figure in ("count", "dsp") and number != round(number):
        raise BaPipeError(f"{what} must be a whole number, got '{text[:40]}'")
    return number


def _label(figure: str, value: float, unit: str) -> str:
    """The value in the unit it was given in, bits or bytes."""
    if figure in ("link", "ddr"):
        return format_bandwidth(value) if "B" in unit or not unit else f"{value * 8e-9:.4g} Gb/s"
    if figure in ("memory", "ram"):
        return format_bytes(value)
    if figure == "clock":
        return f"{value / 1e6:.4g} MHz"
    return f"{value:.6g}"


def changed(cluster: Cluster, name: str, value: float) -> Cluster:
    """The cluster with one figure at another value; `board.` means all types, `vcu118.` one."""
    figure = _figure(name)
    prefix = name.rpartition(".")[0]
    if figure == "link":
        return with_link_bandwidth(cluster, value)
    if figure == "count":
        return _of_count(cluster, int(value))
    chosen = list(cluster.types) if prefix in ("", "board") else [prefix]
    for kind in chosen:
        if kind not in cluster.types:
            raise BaPipeError(f"the cluster has no type '{kind[:60]}'{nearest(kind, cluster.types)}; it has "
                              f"{', '.join(cluster.types)}")  # fmt: skip
    types = {key: _of_type(kind, figure, value) if key in chosen else kind for key, kind in cluster.types.items()}
    return dataclasses.replace(cluster, types=types)


def _of_type(kind: AcceleratorType, figure: str, value: float) -> AcceleratorType:
    if figure == "memory":
        return dataclasses.replace(kind, memory=value)
    if figure == "ddr":
        return dataclasses.replace(kind, memory_bandwidth=value)
    if not kind.board:
        raise BaPipeError(
            f"'{kind.name}' is no FPGA board, so it has no {figure}; sweep {', '.join(CLUSTER_FIGURES)}"
        )
    key = {"ram": "on_chip_bytes"}.get(figure, figure)
    if figure in ("utilisation", "usable_ram") and value > 1:
        raise BaPipeError(f"{figure} is a share of at most 1, got {value:g}")
    # The peak follows DSPs and clock.
    scale = value / kind.board[key] if figure in ("dsp", "clock") else 1.0
    flops = {dtype: rate * scale for dtype, rate in kind.flops.items()}
    return dataclasses.replace(kind, board={**kind.board, key: value}, flops=flops)


def _of_count(cluster: Cluster, count: int) -> Cluster:
    kinds = dict.fromkeys(item.type for item in cluster.accelerators)
    if len(kinds) > 1 or len(cluster.nodes) > 1 or cluster.levels:
        raise BaPipeError(
            f"count needs alike accelerators of one node and no levels, got {', '.join(kinds)}; sweep another "
            "figure"
        )
    if not 1 <= count <= MAX_ACCELERATORS:
        raise BaPipeError(f"count must be from 1 to {MAX_ACCELERATORS}, got {count}")
    kind, node = cluster.accelerators[0].type, cluster.accelerators[0].node
    members = tuple(Accelerator(name=f"{node}/{index}", type=kind, node=node) for index in range(count))
    return cluster.part(members)


def sweep_cluster(
    cluster: Cluster, sweeps: Sequence[Sweep], answer: Callable[[Cluster, bool], SweepAnswer]
) -> WhatIf:
    """Ask for every value or pair of values; `answer` is given whether it is at an end of the first sweep."""
    if not 1 <= len(sweeps) <= 2:
        raise BaPipeError(f"give one --sweep or two, got {len(sweeps)}")
    if math.prod(len(item.values) for item in sweeps) > 4 * MOST_POINTS:
        raise BaPipeError(f"more than {4 * MOST_POINTS} points; lower --points")
    points = []
    first = sweeps[0]
    for row in range(len(sweeps[1].values) if len(sweeps) > 1 else 1):
        base = changed(cluster, sweeps[1].name, sweeps[1].values[row]) if len(sweeps) > 1 else cluster
        for column, value in enumerate(first.values):
            at = (column, row) if len(sweeps) > 1 else (column,)
            end = column in (0, len(first.values) - 1)
            points.append(Point(at=at, answer=answer(changed(base, first.name, value), end)))
    return WhatIf(sweeps=tuple(sweeps), points=tuple(points))


def fpga_answers(
    model: Model, request: Request, *, dtype: str, parameters: Parameters
) -> Callable[[Cluster, bool], SweepAnswer]:
    """Answers of the FPGA planner; what twice the DSPs, RAM, DDR bandwidth or links save, at the ends.

    The savings are those of fluid allocation, whose best plan never gets slower by having more.
    """

    def planned(cluster: Cluster, own: Parameters) -> tuple[float, str]:
        best = explore_fpga(model, cluster, request, dtype=dtype, parameters=own).best
        boards = "" if len(best.loads) == len(cluster) else f" of {len(cluster)}"
        return best.time, f"{best.rule.schedule}, {len(best.loads)}{boards} stages, b={best.rule.microbatch}"

    def answer(cluster: Cluster, end: bool) -> SweepAnswer:
        try:
            time, label = planned(cluster, parameters)
        except InfeasibleError as error:
            return SweepAnswer(time=None, plan=str(error))
        if not end:
            return SweepAnswer(time=time, plan=label)
        fluid = dataclasses.replace(parameters, allocation="fluid")
        larger = {
            "DSP": _each(cluster, "dsp", lambda kind: float(round(kind.board["dsp"] * _GAIN))),
            "RAM": _each(cluster, "ram", lambda kind: kind.board["on_chip_bytes"] * _GAIN),
            "DDR": _each(cluster, "ddr", lambda kind: kind.memory_bandwidth * _GAIN),
            "link": _more_link(cluster),
        }
        base = planned(cluster, fluid)[0]
        gains = {}
        for name, own in larger.items():
            with contextlib.suppress(BaPipeError):  # more than the transceivers carry cannot be had
                gains[name] = 1 - planned(own, fluid)[0] / base
        return SweepAnswer(time=time, plan=label, gains=gains)

    return answer


def gpu_answers(profile: Callable[[Cluster], Profile], request: Request) -> Callable[[Cluster, bool], SweepAnswer]:
    """Answers of the general planner; what twice the compute, links or memory save, at the ends."""

    def planned(cluster: Cluster, costs: Profile) -> tuple[float, str]:
        best = explore(costs, cluster, request).best
        return best.time, f"{best.candidate.label}, b={best.candidate.chain.microbatch}"

    def answer(cluster: Cluster, end: bool) -> SweepAnswer:
        costs = profile(cluster)
        try:
            time, label = planned(cluster, costs)
        except InfeasibleError as error:
            return SweepAnswer(time=None, plan=str(error))
        if not end:
            return SweepAnswer(time=time, plan=label)
        roomy = _each(cluster, "memory", lambda kind: kind.memory * _GAIN)
        times = {
            "compute": planned(cluster, each_way(costs, _faster))[0],
            "link": planned(_more_link(cluster), costs)[0],
            "memory": planned(roomy, costs)[0],
        }
        return SweepAnswer(time=time, plan=label, gains={name: 1 - value / time for name, value in times.items()})

    return answer


def _each(cluster: Cluster, figure: str, value: Callable[[AcceleratorType], float]) -> Cluster:
    types = {name: _of_type(kind, figure, value(kind)) for name, kind in cluster.types.items()}
    return dataclasses.replace(cluster, types=types)


def _more_link(cluster: Cluster) -> Cluster:
    def wider(link: Link) -> Link:
        return dataclasses.replace(link, bandwidth=link.bandwidth * _GAIN)

    levels = tuple(
        level
        if level.uplink is None
        else dataclasses.replace(
            level, uplink=dataclasses.replace(level.uplink, bandwidth=level.uplink.bandwidth * _GAIN)
        )
        for level in cluster.levels
    )
    return dataclasses.replace(cluster, levels=levels).with_links(wider)


def _faster(costs: Profile) -> Profile:
    def quicker(rows: tuple[tuple[float, ...], ...]) -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(value / _GAIN for value in row) for row in rows)

    tables = {
        name: dataclasses.replace(
            table,
            forward=quicker(table.forward),
            backward=quicker(table.backward),
            weight_gradient=None if table.weight_gradient is None else quicker(table.weight_gradient),
            parting=None if table.parting is None else quicker(table.parting),
            part_forward=None if table.part_forward is None else quicker(table.part_forward),
            part_backward=None if table.part_backward is None else quicker(table.part_backward),
        )
        for name, table in costs.accelerators.items()
    }
    return dataclasses.replace(costs, accelerators=tables)
