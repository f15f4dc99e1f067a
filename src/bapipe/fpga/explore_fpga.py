"""From a network and a chain of boards to the best pipeline: schedule × micro-batch × boards used × cuts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from bapipe.costs.optimizers import DEFAULT_OPTIMIZER, find_optimizer
from bapipe.errors import BaPipeError, InfeasibleError
from bapipe.fpga.assumptions import Parameters
from bapipe.fpga.board import Board, boards_of, require_transceivers
from bapipe.fpga.cnn import Cnn, make_network
from bapipe.fpga.cut_places import Units, line_buffer, make_units
from bapipe.fpga.dsp_table import DspTable, make_dsp_table
from bapipe.fpga.exact_cuts import Run, best_cuts
from bapipe.fpga.other_strategies import stepwise
from bapipe.fpga.outcome import Outcome, dimension
from bapipe.fpga.replicated_boards import DP_VARIANTS, DataParallel, data_parallel
from bapipe.fpga.schedule_rules import FPGA_SCHEDULES, Rule
from bapipe.fpga.stage_sizing import StageLoad
from bapipe.hardware.cluster import Cluster
from bapipe.models.layers import Model
from bapipe.planner.partition.paper.stage_cuts import hill_climb
from bapipe.planner.partition.paper.step_record import Step
from bapipe.planner.request import Request
from bapipe.units import format_bytes

__all__ = ["FPGA_STRATEGIES", "FpgaExploration", "explore_fpga"]

FPGA_STRATEGIES = ("exact", "bapipe", "uniform", "time")
_LARGEST_MICROBATCH = 64
_DEFAULT_GLOBAL_BATCH = 128
"""the paper's for FPGA clusters"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FpgaExploration:
    """What was found for an FPGA cluster."""

    request: Request
    parameters: Parameters
    model: Model
    network: Cnn
    cluster: Cluster
    boards: tuple[Board, ...]
    units: Units
    dtype: str
    global_batch: int
    best: Outcome
    by_schedule: dict[str, Outcome]
    """the best of each schedule that was tried"""
    alternatives: tuple[DataParallel, ...]
    steps: tuple[Step, ...]
    tried: int
    """cuts of a schedule, micro-batch and run of boards that were searched for"""

    @property
    def lower_bound(self) -> float:
        """Seconds per global batch: all DSPs of all boards busy all the time, equation (1), no communication."""
        return self.global_batch * self.network.training_macs / sum(board.rate for board in self.boards)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Setting:
    request: Request
    parameters: Parameters
    network: Cnn
    cluster: Cluster
    boards: tuple[Board, ...]
    units: Units
    tables: dict[float, DspTable]
    global_batch: int

    def run(self, rule: Rule, offset: int, depth: int) -> Run:
        links = tuple(self.cluster.link(index, index + 1) for index in range(offset, offset + depth - 1))
        return Run(
            units=self.units,
            boards=self.boards[offset : offset + depth],
            links=links,
            rule=rule,
            copies=_optimizer_copies(self.request),
            parameters=self.parameters,
            tables=self.tables,
        )


def _optimizer_copies(request: Request) -> float:
    """Copies of the weights that the optimizer keeps; nothing is profiled on an FPGA, so the table says."""
    return find_optimizer(request.optimizer or DEFAULT_OPTIMIZER).state


def explore_fpga(
    model: Model,
    cluster: Cluster,
    request: Request | None = None,
    *,
    dtype: str = "fp16",
    parameters: Parameters | None = None,
) -> FpgaExploration:
    """Find the fastest pipeline over the boards in their cabled order, and weigh data parallelism beside it.

    Data parallelism is shown among the alternatives and never chosen: images enter a chain at its first board, and
    a cluster describes no input of others.
    Raises InfeasibleError, saying what is short, if no pipeline fits.
    """
    request = request or Request()
    parameters = parameters or Parameters()
    _refuse(request)
    network = make_network(model, allocation=parameters.allocation)
    boards = boards_of(cluster, dtype=dtype)
    require_transceivers(cluster, boards)
    units = make_units(network, parameters)
    global_batch = request.global_batch or _DEFAULT_GLOBAL_BATCH
    setting = _Setting(
        request=request,
        parameters=parameters,
        network=network,
        cluster=cluster,
        boards=boards,
        units=units,
        tables=_tables(units, boards, parameters),
        global_batch=global_batch,
    )
    found: dict[str, Outcome] = {}
    steps: tuple[Step, ...] = ()
    tried = 0
    for rule in _rules(setting):
        fastest = min((outcome.time for outcome in found.values()), default=math.inf)
        for outcome, own_steps in _outcomes(setting, rule, found.get(rule.schedule), fastest):
            tried += 1
            held = found.get(rule.schedule)
            if outcome is not None and outcome.fits and (held is None or _rank(outcome) < _rank(held)):
                found[rule.schedule] = outcome
                steps = own_steps or steps
    if request.strategy == "exact" and parameters.allocation == "integer":
        found = {name: _polish(outcome) for name, outcome in found.items()}
    if not found:
        raise _nothing_fits(setting)
    copies = _optimizer_copies(request)
    return FpgaExploration(
        request=request,
        parameters=parameters,
        model=model,
        network=network,
        cluster=cluster,
        boards=boards,
        units=units,
        dtype=dtype,
        global_batch=global_batch,
        best=min(found.values(), key=_rank),
        by_schedule=found,
        alternatives=tuple(
            data_parallel(
                units,
                cluster,
                boards,
                variant=variant,
                global_batch=global_batch,
                copies=copies,
                parameters=parameters,
            )
            for variant in DP_VARIANTS
        ),
        steps=steps,
        tried=tried,
    )


def _refuse(request: Request) -> None:
    if request.strategy not in FPGA_STRATEGIES:
        raise BaPipeError(
            f"strategy {request.strategy} is not for FPGA clusters; known here: {', '.join(FPGA_STRATEGIES)}"
        )
    if request.cap is not None:
        raise BaPipeError(
            f"--in-flight belongs to the schedule 1f1b, which does not suit FPGAs; {', '.join(FPGA_SCHEDULES)} "
            "set their own K per stage; leave it out"
        )
    if request.schedule not in (None, *FPGA_SCHEDULES):
        raise BaPipeError(
            f"schedule {request.schedule} does not suit FPGAs; known here: {', '.join(FPGA_SCHEDULES)} "
            "(data parallelism is among the alternatives)"
        )


def _tables(units: Units, boards: tuple[Board, ...], parameters: Parameters) -> dict[float, DspTable]:
    if parameters.allocation == "fluid":
        return {}
    least = float(units.macs[-1]) / sum(board.rate for board in boards)
    slowest = min(board.cycles_per_second for board in boards)
    # Stages hold more image times than one under 1f1b-as; the grid starts below any interval that could be asked.
    shortest = least * slowest / (1 + parameters.refill * float(units.lead[-1]))
    rates = dict.fromkeys(board.macs_per_dsp for board in boards)
    return {rate: make_dsp_table(units, macs_per_dsp=rate, shortest=shortest) for rate in rates}


def _rank(outcome: Outcome) -> tuple[float, float, float]:
    """Least time; ties by memory, then by bandwidth."""
    memory = max(float(load.demand.weights * 2 + load.demand.features * load.images) for load in outcome.loads)
    sent = max((item.forward + item.backward for item in outcome.crossings), default=0.0)
    # Rounding keeps a tie a tie: 128 · P and 8 · 16P differ in their last digits.
    return float(f"{outcome.time:.9g}"), memory, sent


def _rules(setting: _Setting) -> Iterator[Rule]:
    request, global_batch = setting.request, setting.global_batch
    sizes = [2**power for power in range(31) if 2**power <= min(_LARGEST_MICROBATCH, global_batch)]
    sizes = [size for size in sizes if global_batch % size == 0]
    if request.microbatch is not None:
        if global_batch % request.microbatch:
            raise BaPipeError(
                f"a global batch of {global_batch} is no multiple of a micro-batch of {request.microbatch}; "
                "change one"
            )
        sizes = [request.microbatch]
    fill = setting.parameters.refill * float(setting.units.lead[-1]) / len(setting.boards)
    for schedule in ("fbp-as", "1f1b-as"):
        if request.schedule in (None, schedule):
            # Likely ones first, so that others are ruled out by what these reach.
            drain = fill if schedule == "1f1b-as" else 0.0
            ahead = len(setting.boards) - 1
            for size in sorted(sizes, key=lambda size: (global_batch / size + ahead) * (size + drain)):
                yield Rule(
                    schedule=schedule,
                    microbatch=size,
                    global_batch=global_batch,
                    forward_share=setting.network.forward_share,
                    refill=setting.parameters.refill,
                )


def _runs(setting: _Setting, rule: Rule) -> Iterator[tuple[Run, int]]:
    """All runs of neighbouring boards, the whole chain first."""
    count = len(setting.boards)
    depths = range(count, 0, -1)
    if setting.request.stages is not None:
        if setting.request.stages > count:
            raise BaPipeError(
                f"{setting.request.stages} stages need as many boards, the cluster has {count}; lower --stages"
            )
        if setting.request.stages > len(setting.units):
            raise BaPipeError(
                f"{setting.request.stages} stages need as many places to cut, {setting.network.name} has "
                f"{len(setting.units)}; lower --stages"
            )
        depths = range(setting.request.stages, setting.request.stages - 1, -1)
    for depth in depths:
        for offset in range(count - depth + 1):
            yield setting.run(rule, offset, depth), offset


def _outcomes(
    setting: _Setting, rule: Rule, held: Outcome | None, fastest: float
) -> Iterator[tuple[Outcome | None, tuple[Step, ...]]]:
    """Outcomes of one rule that may beat the best of its schedule so far (`held`) or, on fewer boards, of any."""
    strategy = setting.request.strategy
    beat = math.inf if held is None else held.time * (1 - 1e-9)
    for run, offset in _runs(setting, rule):
        if run.depth < len(setting.boards):
            beat = min(beat, fastest)
        if run.depth > len(run.units) or run.bound() >= beat:
            continue
        candidates: list[tuple[tuple[int, ...], tuple[Step, ...]]] = []
        by_layers = run.depth <= len(setting.network.layers)
        if strategy != "exact" and not by_layers:
            continue
        if strategy != "exact":
            candidates.append(stepwise(run, strategy))
        else:
            found = best_cuts(run, beat=beat)
            if found is not None:
                candidates.append((found.cuts, ()))
                whole_tiles = setting.parameters.allocation == "integer"
                if whole_tiles and by_layers and run.depth == len(setting.boards):
                    # The paper's steps now and then hit on tiles that the search's table cannot tell apart.
                    candidates.append((stepwise(run, "bapipe")[0], ()))
        for cuts, own_steps in candidates:
            outcome = dimension(run, offset, cuts)
            if outcome.fits:
                beat = min(beat, outcome.time)
            yield outcome, own_steps
        if not candidates:
            yield None, ()
        if strategy != "exact":
            return


def _polish(outcome: Outcome) -> Outcome:
    """Move single units across cuts while that shortens the time, every stage dimensioned exactly.

    The search asked a table of intervals a fraction of a per cent apart, so it may stop that far short.
    """
    if len(outcome.cuts) == 1:
        return outcome
    stages: dict[tuple[int, int, int], StageLoad] = {}

    def score(last: tuple[int, ...]) -> tuple[float, ...]:
        tried = dimension(outcome.run, outcome.offset, tuple(unit + 1 for unit in last), known=stages)
        return (tried.time, *sorted((load.period for load in tried.loads), reverse=True))

    climbed = hill_climb(tuple(cut - 1 for cut in outcome.cuts), score)
    return min(outcome, dimension(outcome.run, outcome.offset, tuple(unit + 1 for unit in climbed)), key=_rank)


def _nothing_fits(setting: _Setting) -> InfeasibleError:
    """Name the first thing that no board can take."""
    boards, units = setting.boards, setting.units
    roomiest = max(boards, key=lambda board: (board.ddr, board.ram))
    element = roomiest.element
    if roomiest.ddr <= 0:
        for index, layer in enumerate(units.network.layers):
            share = 1 / int(units.slices[index])
            need = (2 * layer.weights * share + layer.input) * element
            if need > roomiest.ram:
                return InfeasibleError(
                    f"layer '{layer.name[:60]}' needs at least {format_bytes(need)} on chip and no board has DDR; "
                    f"the largest RAM is {format_bytes(roomiest.ram)}: add DDR or RAM"
                )
    largest = max(range(len(units.network.layers)), key=lambda index: line_buffer(units.network, index))
    lines = line_buffer(units.network, largest) * element
    if lines > max(board.ram for board in boards):
        return InfeasibleError(
            f"the FIFOs of layer '{units.network.layers[largest].name[:60]}' take {format_bytes(lines)} on chip, "
            f"the largest RAM is {format_bytes(max(board.ram for board in boards))}; add RAM"
        )
    modules = sum(len(layer.modules) for layer in units.network.layers)
    if setting.parameters.allocation == "integer" and modules > sum(board.dsp for board in boards):
        return InfeasibleError(
            f"{modules} modules need a DSP each, the boards have {sum(board.dsp for board in boards)}; add DSPs"
        )
    total = 2 * units.network.weights * element
    have = sum(board.ram + board.ddr for board in boards)
    return InfeasibleError(
        f"{units.network.name} does not fit: weights and gradients take {format_bytes(total)}, activations come "
        f"on top, RAM and DDR of all boards hold {format_bytes(have)}; add boards, DDR or RAM"
    )
