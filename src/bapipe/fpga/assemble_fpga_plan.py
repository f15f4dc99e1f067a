"""From what the search found to the Plan that is written and shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from bapipe.costs.optimizers import DEFAULT_OPTIMIZER
from bapipe.fpga.deploy import deploy
from bapipe.fpga.explore_fpga import FpgaExploration
from bapipe.fpga.fpga_profile import fpga_profile
from bapipe.fpga.outcome import Outcome, costs_of, simulated
from bapipe.fpga.replicated_boards import DataParallel
from bapipe.fpga.stage_sizing import StageLoad, held_layers
from bapipe.records.plan import Alternative, LayerPart, MemoryParts, Plan, PlanStage, Prediction, gap_over
from bapipe.schedule.schedule_file import ScheduleFile
from bapipe.units import format_seconds, format_slower

__all__ = ["make_fpga_plan", "schedule_reason"]


def make_fpga_plan(found: FpgaExploration) -> Plan:
    """The plan of the best pipeline, with what every board is built with and every alternative."""
    best = found.best
    schedule, timeline = simulated(best, found.cluster)
    profile = fpga_profile(found.network, found.boards, dtype=found.dtype, microbatches=(best.rule.microbatch,))
    return Plan(
        kind="pipeline",
        model=profile.model,
        profile_hash=profile.hash,
        cluster=found.cluster,
        dtype=found.dtype,
        optimizer=found.request.optimizer or DEFAULT_OPTIMIZER,
        strategy=found.request.strategy,
        microbatch_size=best.rule.microbatch,
        microbatches=best.rule.microbatches,
        global_batch=found.global_batch,
        stages=_stages(best, found),
        schedule=ScheduleFile.of(schedule),
        prediction=Prediction(
            time=timeline.time,
            throughput=found.global_batch / timeline.time,
            bubble=timeline.bubble,
            exposed_communication=max(timeline.exposed_communication()),
            lower_bound=found.lower_bound,
            gap=gap_over(found.lower_bound, timeline.time),
            source="simulated",
        ),
        alternatives=_alternatives(found, timeline.time),
        notes=_notes(found, timeline.time),
        deployment=deploy(best, found.cluster),
    )


def _stages(best: Outcome, found: FpgaExploration) -> tuple[PlanStage, ...]:
    costs = costs_of(best)
    stages = []
    for index, load in enumerate(best.loads):
        held = held_layers(found.units, load.first, load.stop)
        stages.append(
            PlanStage(
                accelerators=(found.cluster.accelerators[best.offset + index].name,),
                first_layer=held[0].index,
                last_layer=held[-1].index,
                layers=tuple(item.layer.name for item in held),
                fractions=tuple(
                    LayerPart(layer=item.index, start=item.start, stop=item.stop, of=item.of)
                    for item in held
                    if item.stop - item.start < item.of
                ),
                forward=costs.forward[index],
                backward=costs.backward[index],
                weight_gradient=costs.weight_gradient[index],
                update=costs.update[index],
                send_forward_bytes=costs.send_forward[index] if index < len(best.crossings) else 0.0,
                send_backward_bytes=costs.send_backward[index - 1] if index else 0.0,
                weight_bytes=float(load.demand.weights),
                memory_bytes=_memory(load),
                memory_parts=_parts(load),
                memory_capacity=load.board.ram + load.board.ddr,
                in_flight=load.images / best.rule.microbatch,
            )
        )
    return tuple(stages)


def _memory(load: StageLoad) -> float:
    parts = asdict(_parts(load))
    return float(sum(parts.values()))


def _parts(load: StageLoad) -> MemoryParts:
    demand = load.demand
    return MemoryParts(
        weights=float(demand.weights),
        gradients=float(demand.weights),
        optimizer=float(demand.state),
        activations=float(demand.features * load.images),
        buffers=float(demand.buffers),
        workspace=0.0,
    )


def _pace(time: float, best: float) -> str:
    slower = time / best - 1
    if abs(slower) < 5e-4:
        return "as fast"
    return format_slower(slower) if slower > 0 else f"{-slower:.1%} faster"


def _alternatives(found: FpgaExploration, time: float) -> tuple[Alternative, ...]:
    alternatives = []
    for name, outcome in found.by_schedule.items():
        if outcome is not found.best:
            alternatives.append(
                Alternative(
                    name=f"{name}, {len(outcome.loads)} stages, micro-batch {outcome.rule.microbatch}",
                    time=outcome.time,
                    memory_bytes=max(_memory(load) for load in outcome.loads),
                    reason=f"{_pace(outcome.time, time)}; {_why(outcome)}",
                )
            )
    for way in found.alternatives:
        fullest = max(item.memory for item in way.replicas)
        reason = "does not fit" if way.time is None else f"{_pace(way.time, time)}; {_bound(way)}"
        if way.time is not None and way.time < time:
            reason = f"by formula {reason}; needs images at every board"
        alternatives.append(
            Alternative(
                name=f"data parallelism, {way.variant}",
                time=way.time,
                memory_bytes=fullest,
                reason=reason,
            )
        )
    return tuple(alternatives)


def _bound(alternative: DataParallel) -> str:
    """ρ of every type: above 1 the board waits for DDR."""
    ratios = dict.fromkeys((item.type, round(item.ratio, 2)) for item in alternative.replicas)
    shown = ", ".join(f"{kind} {ratio:g}" for kind, ratio in ratios)
    return f"ρ = D/C: {shown}; sync {format_seconds(alternative.synchronise)}"


def _why(outcome: Outcome) -> str:
    kind, index = outcome.binding
    load = outcome.loads[min(index, len(outcome.loads) - 1)]
    if outcome.rule.schedule == "1f1b-as" and kind == "dsp":
        return f"refills {load.fill * outcome.rule.refill:.1f} image times of layers at each change of direction"
    return {"dsp": "DSPs bind", "ddr": "DDR binds: twice the activations in flight", "link": "a link binds"}[kind]


def schedule_reason(found: FpgaExploration) -> str:
    """Why this schedule and micro-batch."""
    best = found.best
    chosen = f"{best.rule.schedule} at micro-batch {best.rule.microbatch}"
    others = [outcome for outcome in found.by_schedule.values() if outcome is not best]
    if not others:
        return f"{chosen}: the only schedule asked for"
    other = others[0]
    ours, theirs = best.period / best.rule.microbatch, other.period / other.rule.microbatch
    against = f"{other.rule.schedule} at best (micro-batch {other.rule.microbatch})"
    if best.rule.schedule == "fbp-as":
        return (
            f"{chosen}: it streams on at {format_seconds(ours)} per image where {against} takes "
            f"{format_seconds(theirs)}, as it {_why(other)}"
        )
    return (
        f"{chosen}: {format_seconds(ours)} per image and half the activations in flight; {against} takes "
        f"{format_seconds(theirs)}, {_why(other)}"
    )


def _why_no_replicas(found: FpgaExploration, faster: Sequence[DataParallel], time: float) -> str:
    """Why data parallelism is not the plan though its formula has it faster."""
    best = min(faster, key=lambda item: item.time or 0.0)
    shares = ", ".join(str(item.images) for item in best.replicas)
    return (
        f"data parallelism as {', '.join(item.variant for item in faster)} is faster by its formula, by up to "
        f"{1 - (best.time or 0.0) / time:.1%}, but cannot be this plan: images enter the chain at its first "
        f"board, and it needs them at every board ({shares} of {found.global_batch}); the cluster describes no "
        "such input, and nothing counts what it costs"
    )


def _notes(found: FpgaExploration, time: float) -> tuple[str, ...]:
    notes = [schedule_reason(found)]
    faster = [item for item in found.alternatives if item.time is not None and item.time < time]
    if faster:
        notes.append(_why_no_replicas(found, faster, time))
    notes.append(
        f"{found.tried} searches over schedule, micro-batch and boards; {found.parameters.allocation} allocation "
        "of DSPs"
    )
    if found.parameters.allocation == "integer":
        notes.append("heuristic: with whole tiles cuts are searched on intervals 0.3 % apart, then one by one")
    notes.append(
        "times are simulated on the FPDeep model, whose clock · utilisation is fitted to the paper's Table VI; "
        "--explain lists every assumption"
    )
    return tuple(notes)
