"""Pass: on a mixed cluster, pipelines of one type each that take micro-batches by their speed.

The depth and the micro-batch size are chosen by outlines on the type that has most of the cluster's speed. The
best are searched there, with no more memory than every type has, and their plans run on pipelines of all types.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from bapipe.costs.recomputed_layers import recomputing
from bapipe.costs.stage_time import UnitSeconds
from bapipe.errors import BaPipeError
from bapipe.planner.candidate import Candidate, unreplicated
from bapipe.planner.cluster_parts import WORTH_IDLE, Part, copies_wanted, mixed
from bapipe.planner.evaluate import Evaluation, evaluate
from bapipe.planner.outline import Outline
from bapipe.planner.passes.copy_parts import copyable, family_of_plan, outlines
from bapipe.planner.passes.recompute_layers import recompute_layers
from bapipe.planner.passes.reorder import reorder_pipelines
from bapipe.planner.passes.try_sizes import try_sizes
from bapipe.planner.state import SearchState
from bapipe.planner.typed_pipelines import (
    TypedPipelines,
    copies_allowed,
    deal,
    pipeline_ends,
    pipelines_of_types,
    stage_pace,
    typed_candidate,
)
from bapipe.schedule.dealing import Dealing, dealt_counts

__all__ = ["deal_pipelines"]

Numbers = Mapping[str, int]
"""pipelines of each type"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _DepthTrial:
    """The outline of one pipeline of the type that is looked at."""

    depth: int
    numbers: Numbers
    size: int
    found: Outline


def deal_pipelines(state: SearchState) -> None:
    """Add pipelines of one type each, of the best depths, with micro-batches dealt by speed."""
    if not mixed(state.cluster) or not copies_wanted(state) or state.request.dealing != "speed":
        return
    counts = Counter(item.type for item in state.cluster.accelerators)
    speeds = _speeds(state, min(state.sizes))
    base = _of_one_type(state, max(counts, key=lambda name: counts[name] * speeds[name]))
    trials = list(_trials(state, base, counts))
    fitting = sorted((trial for trial in trials if trial.found.fits), key=lambda trial: trial.found.time)
    if not fitting:
        return
    within = state.tuning.near_part * fitting[0].found.time
    near = [trial for trial in fitting if trial.found.time <= within]
    for depth in list(dict.fromkeys(trial.depth for trial in near))[: state.tuning.searched_depths]:
        own = [trial for trial in near if trial.depth == depth]
        sizes = list(dict.fromkeys(trial.size for trial in own))
        for size in sizes[: state.tuning.part_sizes]:
            for plan in _plans(state, base, depth, own[0].numbers, size):
                _deal(state, plan, depth, own[0].numbers)
                _deal_to_fewer(state, plan, depth, own[0].numbers)


def _speeds(state: SearchState, size: int) -> dict[str, float]:
    """Samples/s of one accelerator of each type, at best."""
    chain = state.chain(size)
    work = UnitSeconds.of(chain).work.sum(axis=1)
    return {name: size / float(work[chain.row(name)]) for name in chain.types}


def _of_one_type(state: SearchState, name: str) -> SearchState:
    """A search on the accelerators of one type, with no more memory than every type has."""
    cluster = state.cluster
    least = min(cluster.type_of(index).memory for index in range(len(cluster)))
    own = cluster.part([item for item in cluster.accelerators if item.type == name])
    own = replace(own, types={**own.types, name: replace(own.types[name], memory=least)})
    return state.narrowed(state.request, sizes=state.sizes, cluster=own)


def _trials(state: SearchState, base: SearchState, counts: Numbers) -> Iterator[_DepthTrial]:
    """Outlines of pipelines of every depth; ends where deeper ones have stopped to be faster."""
    chain = base.chain(min(state.sizes))
    needed = float(state.static_bytes(chain).sum())
    fastest, slower = float("inf"), 0
    for depth, numbers in _depths(state, counts):
        if slower == state.tuning.slower_parts:
            break
        if depth > len(base.cluster) or needed > depth * base.cluster.type_of(0).memory:
            continue
        trials = list(_at_depth(state, base, depth, numbers))
        yield from trials
        best = min((trial.found.time for trial in trials if trial.found.fits), default=float("inf"))
        if best < float("inf"):
            slower = 0 if best < (1 - state.tuning.as_fast) * fastest else slower + 1
        fastest = min(fastest, best)


def _depths(state: SearchState, counts: Numbers) -> Iterator[tuple[int, Numbers]]:
    """Depths with the pipelines of each type.

    What does not go into pipelines is left over, at most a fifth of the cluster's speed; and where others that are
    little shallower or deeper leave less over, not much more than these.
    """
    speeds = _speeds(state, min(state.sizes))
    whole = sum(counts[name] * speeds[name] for name in counts)
    deepest = min(max(counts.values()), len(state.profile.layers))
    microbatches = state.global_batch // min(state.sizes)
    used = []
    for depth in range(1, deepest + 1):
        numbers = {name: count // depth for name, count in counts.items()}
        shares = []
        for copies in copies_allowed(numbers, microbatches):
            each = {name: number // copies for name, number in numbers.items()}
            if depth * sum(each.values()) <= state.tuning.dealt_ranks:
                shares.append(copies * depth * sum(number * speeds[name] for name, number in each.items()))
        used.append(max(shares, default=0.0) / whole)
    for depth in range(1, deepest + 1):
        beside = used[int(depth / state.tuning.beside_depth) : math.ceil(depth * state.tuning.beside_depth)]
        if used[depth - 1] >= max(1 - WORTH_IDLE, max(beside) - state.tuning.more_idle):
            yield depth, {name: count // depth for name, count in counts.items() if count >= depth}


def _at_depth(state: SearchState, base: SearchState, depth: int, numbers: Numbers) -> Iterator[_DepthTrial]:
    """The pipelines of each micro-batch size, most promising first, until no size can be faster."""
    name = base.cluster.accelerators[0].type
    part = _part(state, base, depth, numbers[name])
    fastest = float("inf")
    shares = {size: _share(state, base, depth, numbers, size) for size in state.sizes}
    for size in sorted(shares, key=lambda size: shares[size].perfect_time(base.chain(size))):
        if shares[size].perfect_time(base.chain(size)) >= fastest:
            break
        for found in outlines(state, shares[size], part, size):
            yield _DepthTrial(depth=depth, numbers=numbers, size=size, found=found)
            if found.fits:
                fastest = min(fastest, found.time)


def _share(state: SearchState, base: SearchState, depth: int, numbers: Numbers, size: int) -> SearchState:
    """A search for one pipeline of the type, with its share of the global batch."""
    speeds, name = _speeds(state, size), base.cluster.accelerators[0].type
    each = state.global_batch / size * speeds[name] / sum(numbers[kind] * speeds[kind] for kind in numbers)
    request = replace(state.request, global_batch=size * max(1, round(each)))
    cluster = base.cluster.part(base.cluster.accelerators[:depth])
    return base.narrowed(request, sizes=(size,), cluster=cluster, to_copy=True, straight=True)


def _part(state: SearchState, base: SearchState, depth: int, copies: int) -> Part:
    """One pipeline of the type, in so many copies."""
    kind = base.cluster.accelerators[0].type
    own = [index for index, item in enumerate(state.cluster.accelerators) if item.type == kind]
    apart = tuple(tuple(own[copy * depth + place] for copy in range(copies)) for place in range(depth))
    near = tuple(tuple(own[place * copies + copy] for copy in range(copies)) for place in range(depth))
    cluster = base.cluster.part(base.cluster.accelerators[:depth])
    return Part(copies=copies, cluster=cluster, apart=apart, near=near)


def _plans(state: SearchState, base: SearchState, depth: int, numbers: Numbers, size: int) -> list[Candidate]:
    """The best plans of one pipeline of the type that run in copies."""
    share = _share(state, base, depth, numbers, size)
    most = max(1, state.tuning.whole_actions // depth)
    if share.global_batch // size > most:
        request = replace(share.request, global_batch=size * most)
        share = base.narrowed(request, sizes=(size,), cluster=share.cluster, to_copy=True, straight=True)
    share.tried_sizes = (size,)
    try:
        for run in (try_sizes, reorder_pipelines, recompute_layers):
            run(share)
    except BaPipeError:
        return []
    found = [candidate for candidate in copyable(share) if unreplicated(candidate.stages)]
    return found[: state.tuning.dealt_plans]


def _deal_to_fewer(state: SearchState, plan: Candidate, depth: int, numbers: Numbers) -> None:
    """Add the plan on fewer pipelines, where that may be faster than the best: half of each type, and so on, and
    without the slowest types."""
    size = plan.chain.microbatch
    speeds = _speeds(state, size)
    fastest_first = sorted(numbers, key=lambda name: -speeds[name])
    trials = [{name: numbers[name] for name in fastest_first[:count]} for count in range(len(numbers) - 1, 0, -1)]
    half = dict(numbers)
    while any(number > 1 for number in half.values()):
        half = {name: number // 2 for name, number in half.items() if number > 1}
        trials.append(half)
    for trial in trials:
        soonest = state.global_batch / sum(depth * number * speeds[name] for name, number in trial.items())
        best = state.incumbents.best
        if best is None or soonest < best.time:
            _deal(state, plan, depth, trial)


def _deal(state: SearchState, plan: Candidate, depth: int, numbers: Numbers) -> None:
    """Add the plan of one pipeline on so many of each type, dealt so that they end together."""
    microbatches = state.global_batch // plan.chain.microbatch
    chain, cluster = state.chain(plan.chain.microbatch), state.cluster
    if not chain.recompute:
        chain = recomputing(chain, plan.chain.recompute)
    pipelines = _divided(state, depth, numbers, microbatches)
    if pipelines is None:
        return
    each, fill = stage_pace(chain, plan.stages, cluster, list(numbers))
    family = family_of_plan(state.request, plan)
    own = microbatches // pipelines.copies

    def dealt(dealing: Dealing, *, near: bool) -> Evaluation:
        candidate = typed_candidate(
            chain,
            plan.stages,
            family,
            dealing,
            pipelines=pipelines,
            microbatches=own,
            hardware=state.hardware,
            near=near,
            tuning=state.tuning,
        )
        evaluation = evaluate(candidate, state.hardware)
        state.incumbents.add(f"{candidate.schedule.name}, {len(plan.stages)} stages dealt by speed", evaluation)
        return evaluation

    found: dict[Dealing, Evaluation] = {}
    for _ in range(state.tuning.dealing_rounds):
        dealing = deal(each, fill, pipelines, own)
        if dealing is None:
            # The type that takes longest for its first micro-batch has none: the others do without it.
            last = max(numbers, key=lambda name: fill[name] + each[name])
            fewer = {name: number for name, number in numbers.items() if name != last}
            if fewer:
                _deal(state, plan, depth, fewer)
            return
        if dealing in found:
            break
        found[dealing] = dealt(dealing, near=False)
        fill = _measured_fill(found[dealing], pipelines, each)
    nodes = {cluster.place(index) for index in range(len(cluster))}
    fastest = min(found, key=lambda dealing: found[dealing].time)
    if len(nodes) > 1 and len(pipelines) > depth and found[fastest] is state.incumbents.best:
        dealt(fastest, near=True)


def _measured_fill(
    evaluation: Evaluation, pipelines: TypedPipelines, each: Mapping[str, float]
) -> dict[str, float]:
    """What the pipelines of each type take beside their micro-batches, by the simulator."""
    schedule = evaluation.candidate.schedule
    counts = dealt_counts(schedule.dealing_of(0), len(pipelines.types), schedule.num_microbatches)
    most: dict[str, int] = {}
    for name, count in zip(pipelines.types, counts, strict=True):
        most[name] = max(count, most.get(name, 0))
    ends = pipeline_ends(evaluation, pipelines)
    return {name: max(0.0, ends[name] - each[name] * most[name]) for name in most}


def _divided(state: SearchState, depth: int, numbers: Numbers, microbatches: int) -> TypedPipelines | None:
    """The pipelines in copies that leave about the fewest over, of those that are not too much to simulate."""
    found = []
    for pipelines in pipelines_of_types(state.cluster, depth, numbers, microbatches):
        used = len(pipelines) / (depth * sum(numbers.values()))
        much = depth * (microbatches // pipelines.copies) > state.tuning.whole_actions
        if used >= 1 - WORTH_IDLE and not (much or len(pipelines) > pipelines.copies * state.tuning.dealt_ranks):
            found.append((used, pipelines))
    most = max((used for used, _ in found), default=0.0)
    return next((pipelines for used, pipelines in found if used >= most - state.tuning.more_idle), None)
