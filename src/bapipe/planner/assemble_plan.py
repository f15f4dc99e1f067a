"""From what the search found to the Plan that is written, shown and run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Literal

from bapipe.costs.optimizers import same_step
from bapipe.costs.peak_memory import message_bytes
from bapipe.costs.profile import ProfiledLayer
from bapipe.costs.profile_ways import way_words
from bapipe.costs.recomputed_layers import repeated_forward
from bapipe.costs.segments import Chain
from bapipe.costs.stage_time import stage_seconds
from bapipe.planner.candidate import as_run
from bapipe.planner.candidate_costs import replica_rows
from bapipe.planner.evaluate import Evaluation
from bapipe.planner.fsdp_events import units_of
from bapipe.planner.idle_accelerators import idle_note
from bapipe.planner.search import Exploration
from bapipe.planner.ways import other_may_be_faster, way_note
from bapipe.records.plan import (
    Alternative,
    LayerPart,
    LayerRun,
    MemoryParts,
    Plan,
    PlanReplica,
    PlanStage,
    Prediction,
    gap_over,
)
from bapipe.schedule.schedule_file import ScheduleFile
from bapipe.units import format_bytes, format_seconds, format_slower

__all__ = ["make_plan"]


def make_plan(found: Exploration) -> Plan:
    """The plan of the best evaluation, with its alternatives and why each lost."""
    best = found.best
    chain = best.candidate.chain
    low, high = _range(found, best)
    return Plan(
        kind=_kind(best),
        model=found.profile.model,
        profile_hash=found.profile.hash,
        cluster=found.hardware.cluster,
        dtype=found.profile.dtype,
        optimizer=found.hardware.optimizer.name,
        strategy=found.request.strategy,
        microbatch_size=chain.microbatch,
        microbatches=best.candidate.num_microbatches,
        global_batch=found.global_batch,
        stages=_stages(best, found),
        schedule=ScheduleFile.of(as_run(best.candidate), copies=best.candidate.copies),
        prediction=Prediction(
            time=best.time,
            throughput=best.throughput,
            bubble=best.timeline.bubble,
            exposed_communication=max(best.timeline.exposed_communication()),
            lower_bound=found.lower_bound,
            gap=gap_over(found.lower_bound, best.time),
            source=chain.source,
            low=low,
            high=high,
        ),
        alternatives=_alternatives(found),
        notes=_notes(found),
        compiled=found.compiled,
        zero_stage=int(best.candidate.zero),
        engine=best.candidate.engine,
        units=_units(best),
    )


def _units(best: Evaluation) -> tuple[str, ...]:
    """Modules that FSDP2 shards as one each, where the profile knows the model's modules."""
    chain = best.candidate.chain
    if best.candidate.engine != "fsdp" or not any(layer.modules for layer in chain.profile.layers):
        return ()
    return tuple(name for name, _ in units_of(chain) if name is not None)


def _range(found: Exploration, evaluation: Evaluation) -> tuple[float, float] | tuple[None, None]:
    """Where the time lies, given how well layers and links are known."""
    known = None if found.outlook is None else found.outlook.range(evaluation)
    return (None, None) if known is None else known


def _kind(evaluation: Evaluation) -> Literal["pipeline", "data-parallel", "hybrid"]:
    counts = [len(stage.accelerators) for stage in evaluation.candidate.stages]
    if max(counts) == 1:
        return "pipeline"
    return "data-parallel" if len(counts) == 1 else "hybrid"


def _stages(best: Evaluation, found: Exploration) -> tuple[PlanStage, ...]:
    chain, cluster = best.candidate.chain, found.hardware.cluster
    stages, parted, inflight = [], best.schedule.parted_stages(), best.inflight
    messages = message_bytes(best.schedule, best.stage_bytes)
    seconds = best.stage_seconds
    for index, choice in enumerate(best.candidate.stages):
        first, last = chain.units[choice.first], chain.units[choice.last]
        needed = best.stage_bytes[index]
        layers = chain.profile.layers[first.layer : last.layer + 1]
        stages.append(
            PlanStage(
                accelerators=tuple(cluster.accelerators[member].name for member in choice.accelerators),
                first_layer=first.layer,
                last_layer=last.layer,
                layers=tuple(layer.name for layer in layers),
                modules=tuple(dict.fromkeys(path for layer in layers for path in layer.modules)),
                tied=_tied(layers),
                fractions=_fractions(chain, choice.first, choice.last),
                recompute=choice.recompute,
                recompute_layers=_recompute_layers(chain, choice.first, choice.last),
                repeated_forward=_repeated_forward(best, index),
                forward=best.costs.forward[index],
                backward=best.costs.backward[index],
                weight_gradient=float(seconds.weight_gradient[index]),
                parting=float(seconds.parting[index]),
                update=best.costs.update[index],
                all_reduce=best.costs.all_reduce[index],
                send_forward_bytes=float(chain.boundary_forward[choice.last]),
                send_backward_bytes=_sent_back(best, index),
                sends_gradient=index - 1 not in best.costs.unanswered,
                weight_bytes=needed.weights,
                trainable_bytes=None if needed.trained == needed.weights else needed.trained,
                memory_bytes=best.memory[index],
                memory_capacity=best.capacity[index],
                in_flight=inflight[index],
                saved_bytes=needed.saved_activations,
                kept_bytes=needed.kept,
                delayed_bytes=needed.delayed if index in parted else None,
                buffer_bytes=messages[index],
                workspace_bytes=needed.workspace,
                memory_parts=MemoryParts(**asdict(best.peaks[index])),
                replicas=_replicas(best, index, found),
            )
        )
    return tuple(stages)


def _recompute_layers(chain: Chain, first: int, last: int) -> tuple[LayerRun, ...]:
    """The runs of a stage's layers that recompute; they are whole layers."""
    return tuple(
        LayerRun(first=chain.units[begin].layer, last=chain.units[end].layer)
        for begin, end in chain.recompute
        if first <= begin and end <= last
    )


def _repeated_forward(best: Evaluation, index: int) -> float:
    """On the slowest of the stage's replicas."""
    seconds, chain, choice = best.stage_seconds, best.candidate.chain, best.candidate.stages[index]
    rows = seconds.rows if seconds.on is None else seconds.rows[seconds.on[:, index]]
    return max(repeated_forward(chain, choice.first, choice.last, int(row)) for row in rows)


def _replicas(best: Evaluation, index: int, found: Exploration) -> tuple[PlanReplica, ...] | None:
    """What is each replica's own; None where all replicas of the stage are alike."""
    schedule, choice, chain = best.schedule, best.candidate.stages[index], best.candidate.chain
    own = best.costs.replicas[index] if best.costs.replicas is not None else ()
    if not own and not schedule.dealing_of(index):
        return None
    cluster, held = found.hardware.cluster, best.timeline.peak_in_flight_by_rank()
    copies, dealt = best.candidate.copies, best.candidate.schedule.microbatch_counts(index)
    simulated = schedule.num_ranks // best.candidate.schedule.num_ranks
    rows = replica_rows(chain, choice, cluster)
    known = {row: stage_seconds(chain, [(choice.first, choice.last)], [{row}]) for row in set(rows)}
    replicas = []
    for number, row in enumerate(rows):
        seconds, replica = known[row], number // copies
        place = replica * simulated  # of the first copy, which is as all others
        rank = schedule.placement[index][place]
        replicas.append(
            PlanReplica(
                microbatches=dealt[replica],
                forward=float(seconds.forward[0]),
                backward=float(seconds.backward[0]),
                weight_gradient=float(seconds.weight_gradient[0]),
                parting=float(seconds.parting[0]),
                update=own[place].update if own else best.costs.update[index],
                in_flight=float(held[rank]),
                memory_bytes=best.rank_peaks[rank].total,
                memory_capacity=cluster.type_of(choice.accelerators[number]).memory,
            )
        )
    return tuple(replicas)


def _tied(layers: Sequence[ProfiledLayer]) -> tuple[str, ...]:
    """Layers of other stages whose weights these share."""
    own = {layer.name for layer in layers}
    shared = (layer.shares_weights_with for layer in layers)
    return tuple(dict.fromkeys(name for name in shared if name is not None and name not in own))


def _sent_back(best: Evaluation, index: int) -> float:
    if index == 0:
        return 0.0
    return float(best.candidate.chain.boundary_backward[best.candidate.stages[index - 1].last])


def _fractions(chain: Chain, first: int, last: int) -> tuple[LayerPart, ...]:
    """The layers at the ends of a stage of which it has only some channels."""
    parts: dict[int, LayerPart] = {}
    for unit in chain.units[first : last + 1]:
        held = parts.get(unit.layer)
        start = unit.start if held is None else held.start
        parts[unit.layer] = LayerPart(layer=unit.layer, start=start, stop=unit.stop, of=unit.of)
    return tuple(part for part in parts.values() if part.stop - part.start < part.of)


def _alternatives(found: Exploration) -> tuple[Alternative, ...]:
    best, as_fast = found.best, found.tuning.as_fast
    alternatives = [] if found.other_way is None else [_other_way(found, found.other_way)]
    alone = {_on_one_accelerator(best)}
    for evaluation in found.considered:
        again = _on_one_accelerator(evaluation)
        if evaluation is best or (again is not None and again in alone):
            continue
        alone.add(again)
        name = f"{evaluation.candidate.label}, micro-batch {evaluation.candidate.chain.microbatch}"
        if evaluation.samples != best.samples:
            name += f", global batch of {evaluation.samples:g}"
        short = evaluation.short
        fullest = max(evaluation.memory)
        if short is not None:
            layers = evaluation.candidate.stages[short[0]]
            first, last = (evaluation.candidate.chain.units[unit].layer for unit in (layers.first, layers.last))
            reason = f"{format_bytes(short[1])} short on stage {short[0]} (layers {first} to {last})"
            alternatives.append(Alternative(name=name, time=None, memory_bytes=fullest, reason=reason))
        else:
            slower, more = best.throughput / evaluation.throughput - 1, fullest - max(best.memory)
            why = f"{format_bytes(more)} more" if abs(slower) < as_fast and more > 0 else _cause(evaluation)
            if evaluation.candidate.engine != "bapipe" and slower <= -as_fast:
                why = f"--strategy {evaluation.candidate.engine} takes it; {why}"
            level = found.outlook is not None and found.outlook.within_error(evaluation, best)
            pace = "within error of the best" if level else _pace(slower, as_fast)
            low, high = _range(found, evaluation)
            alternatives.append(
                Alternative(
                    name=name,
                    time=evaluation.time,
                    memory_bytes=fullest,
                    reason=f"{pace}; {why}",
                    low=low,
                    high=high,
                )
            )
    for estimate in found.estimates:
        if estimate.memory > estimate.capacity:
            lacking = format_bytes(estimate.memory - estimate.capacity)
            alternatives.append(
                Alternative(name=estimate.name, time=None, memory_bytes=estimate.memory, reason=f"{lacking} short")
            )
        else:
            reason = f"{_pace(estimate.time / best.time - 1, as_fast)}; not run by BaPipe"
            alternatives.append(
                Alternative(name=estimate.name, time=estimate.time, memory_bytes=estimate.memory, reason=reason)
            )
    return tuple(alternatives)


def _on_one_accelerator(evaluation: Evaluation) -> tuple[object, ...] | None:
    """The same for plans that differ by the name of their schedule alone, which on one accelerator says nothing;
    None where there are several accelerators."""
    candidate = evaluation.candidate
    if len(candidate.stages) > 1 or len(candidate.stages[0].accelerators) > 1:
        return None
    chain, again = candidate.chain, candidate.stages[0].recompute
    taken = (format_seconds(evaluation.time), format_bytes(max(evaluation.memory)))
    return (chain.microbatch, chain.recompute, again, evaluation.samples, candidate.engine, *taken)


def _other_way(found: Exploration, other: Exploration) -> Alternative:
    """The best plan with stages compiled where the plan's run as captured, or the reverse."""
    best = other.best
    low, high = _range(other, best)
    level = found.tuning.as_fast
    pace = _pace(found.best.throughput / best.throughput - 1, level)
    return Alternative(
        name=f"{way_words(compiled=other.compiled)}: {best.candidate.label}, micro-batch "
        f"{best.candidate.chain.microbatch}",
        time=best.time,
        memory_bytes=max(best.memory),
        reason=f"{'within error of the best' if other_may_be_faster(found) and low is not None else pace}; "
        f"{_cause(best)}",
        low=low,
        high=high,
    )


def _pace(slower: float, as_fast: float) -> str:
    if abs(slower) < as_fast:
        return "as fast"
    return format_slower(slower) if slower > 0 else f"predicted {-slower:.1%} faster"


def _cause(evaluation: Evaluation) -> str:
    """What most of the time beyond work goes to."""
    if evaluation.candidate.engine == "fsdp":
        seconds, costs = evaluation.stage_seconds, evaluation.costs
        sent = costs.forward[0] + costs.backward[0] - float(seconds.forward[0] + seconds.backward[0])
        return f"waits {format_seconds(max(0.0, sent))} a micro-batch for weights and gradients"
    exposed = max(evaluation.timeline.exposed_communication())
    reduce = max(evaluation.costs.all_reduce)
    parts = {
        f"bubble {evaluation.timeline.bubble:.0%}": evaluation.timeline.bubble * evaluation.time,
        f"waits {format_seconds(exposed)} for transfers": exposed,
        f"all-reduce {format_seconds(reduce)}": reduce,
    }
    if max(parts.values()) < 1e-6 * evaluation.time:
        again = evaluation.candidate.chain.recompute or any(
            stage.recompute for stage in evaluation.candidate.stages
        )
        return "repeats forwards" if again else "waits for nothing"
    if exposed + reduce < 0.5 * evaluation.timeline.bubble * evaluation.time:
        return next(iter(parts))
    return max(list(parts)[1:], key=lambda name: parts[name])


def _notes(found: Exploration) -> tuple[str, ...]:
    chain = found.best.candidate.chain
    notes = [
        f"a perfect split would take {format_seconds(found.ideal)} per micro-batch of {chain.microbatch} (the "
        "paper's equation 1)",
        f"{found.evaluated} plan{'s' if found.evaluated != 1 else ''} simulated",
    ]
    weights, trained = float(chain.weight_bytes.sum()), float(chain.trainable_bytes.sum())
    if trained < weights:
        notes.append(
            f"{format_bytes(trained)} of {format_bytes(weights)} of weights are trained: the rest is frozen, with "
            "no gradients, optimizer state or gradient sync"
        )
    if chain.recompute:
        notes.append(_recomputed(found.best))
    idle = idle_note(found.best, found.considered, found.hardware, found.request)
    if idle is not None:
        notes.append(idle)
    if found.outlook is not None:
        layers, links = found.outlook.errors.largest
        notes.append(
            f"ranges: 5th to 95th percentile of {found.outlook.times.shape[1]} scenarios in which layers are "
            f"off by {layers:.1%} and links by {links:.1%}; the plan loses least in their mean"
        )
    most = found.tuning.most_types
    if len(chain.types) > most and (found.left_out is None or found.left_out >= found.tuning.as_fast):
        notes.append(
            f"heuristic: with more than {most} types of accelerators the exact partition keeps the cluster's order"
        )
    if found.left_out is not None:
        notes.append(_searched(found.left_out, found.tuning.as_fast))
    if "analytic" in chain.source or "simulated" in chain.source:
        types = ", ".join(dict.fromkeys(item.type for item in found.hardware.cluster.accelerators))
        notes.append(
            f"times are {chain.source}, not measured: profile the model on {types} for figures to rely on"
        )
    way = way_note(found)
    if way is not None:
        notes.append(way)
    if found.compiled and not found.profile.compiled:
        notes.append("stages run compiled, times are of layers that are not: profile with --compile for their own")
    if found.profile.compiled and not found.compiled:
        notes.append(
            "stages run as captured, times are of compiled layers: profile without --compile for their own"
        )
    ends = [chain.units[stage.last] for stage in found.best.candidate.stages]
    if any(unit.stop < unit.of for unit in ends):
        unknown = [name for name in chain.types if found.profile.table(name).part_forward is None]
        if unknown:
            notes.append(
                "parts of divided layers are taken to cost their share, though they may take longer: profile "
                f"{', '.join(unknown)} with --parts"
            )
    wanted = found.hardware.optimizer.name
    timed = {found.profile.table(name).optimizer or "" for name in chain.types}
    others = sorted(timed - {"", wanted, *same_step(wanted)})
    if others:
        notes.append(
            f"the optimizer step is timed with {', '.join(others)} but planned for {wanted}: profile with "
            f"--optimizer {wanted}"
        )
    if chain.interpolated:
        notes.append(f"micro-batch {chain.microbatch} is interpolated between profiled sizes")
    if found.request.space == "paper":
        notes.append("space of the paper: N stages without replicas, or data parallelism without accumulation")
    return tuple(notes)


def _recomputed(best: Evaluation) -> str:
    """Which layers recompute, and what that costs."""
    chain = best.candidate.chain
    layers = [(chain.units[first].layer, chain.units[last].layer) for first, last in chain.recompute]
    named = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in layers)
    most = max(range(len(best.candidate.stages)), key=lambda stage: _repeated_forward(best, stage))
    seconds = _repeated_forward(best, most)
    return (
        f"layers {named} recompute: each run keeps only its input and repeats its forward in the backward, "
        f"{format_seconds(seconds)} of {format_seconds(best.costs.backward[most])} on stage {most}"
    )


def _searched(left_out: float, as_fast: float) -> str:
    """What the search by simulation says of plans that it has not tried."""
    if left_out < as_fast:
        return (
            "no other cuts, accelerators, replicas or in-flight counts are faster: all were simulated or ruled out"
        )
    return f"cuts, accelerators, replicas and in-flight counts not tried could save {left_out:.1%} at most"
