"""Candidates near the best that the search passes over, because by the predicted times others are a little faster.

The search keeps the best of every family. Which cut, which order of accelerators is the fastest turns with small
changes of layers' and links' times, so that where these are known with an error the others count as well.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from bapipe.costs.recomputed_layers import crosses_runs
from bapipe.errors import InfeasibleError
from bapipe.hardware.cluster import Cluster
from bapipe.planner.candidate import Candidate, StageChoice, takes_moves, unreplicated
from bapipe.planner.evaluate import Evaluation, evaluate
from bapipe.planner.incumbents import rank
from bapipe.planner.order_moves import MoveEffort, quicker_order
from bapipe.planner.order_search import orders_under, takes_orders, timed_plans
from bapipe.planner.pipelines import FAMILIES, build, optimal, permitted, with_cuts
from bapipe.planner.scenarios import Scenarios
from bapipe.planner.state import SearchState

__all__ = ["moved_candidates", "other_orders", "quicker_in_scenarios", "sampled_orders"]


def moved_candidates(candidate: Candidate, cluster: Cluster) -> Iterator[Candidate]:
    """The same with one cut a unit earlier or later, or two stages' accelerators swapped where links differ."""
    stages, cuts = candidate.stages, [stage.last for stage in candidate.stages]
    for index, by in itertools.product(range(len(cuts) - 1), (-1, 1)):
        trial = [*cuts[:index], cuts[index] + by, *cuts[index + 1 :]]
        possible = all(before < after for before, after in itertools.pairwise([-1, *trial]))
        if possible and not crosses_runs(candidate.chain, trial):
            yield replace(candidate, stages=with_cuts(stages, trial), steps=())
    mixed = bool(cluster.pairs) or cluster.between is not None or bool(cluster.levels)
    if not mixed or cluster.topology == "chain" or candidate.schedule.num_ranks != len(stages):
        return
    kinds = [cluster.accelerators[stage.accelerators[0]].type for stage in stages]
    for one, other in itertools.combinations(range(len(stages)), 2):
        if kinds[one] == kinds[other]:
            swapped = list(stages)
            swapped[one] = replace(stages[one], accelerators=stages[other].accelerators)
            swapped[other] = replace(stages[other], accelerators=stages[one].accelerators)
            yield replace(candidate, stages=tuple(swapped), steps=())


def other_orders(state: SearchState, near: Sequence[Evaluation]) -> list[Evaluation]:
    """Pipelines over all accelerators with their types in other orders, at the micro-batch sizes near the best.

    Each has the exact partition of its order under the schedules near the best and zb; the fastest get zero-bubble
    orders made for their times too.
    """
    cluster, tuning, request = state.cluster, state.tuning, state.request
    starts = [own for own in near if unreplicated(own.candidate.stages)]
    kinds = [item.type for item in cluster.accelerators]
    if cluster.topology == "chain" or len(set(kinds)) < 2 or not starts or request.strategy != "exact":
        return []
    wanted = _schedules(state, starts)
    families = permitted({name: family for name, family in FAMILIES.items() if name in wanted}, request)
    found: list[Evaluation] = []
    for size in dict.fromkeys(own.candidate.chain.microbatch for own in starts):
        chain, microbatches = state.chain(size), state.global_batch // size
        rows = [chain.row(kind) for kind in kinds]
        depth = request.stages or min(len(cluster), len(chain))
        for order, family in itertools.product(_type_orders(rows, tuning.type_orders), families.values()):
            try:
                stages = optimal(
                    chain, state.hardware, family, microbatches, num_stages=depth, order=order, tuning=tuning
                )
            except InfeasibleError:
                continue
            candidate = build(chain, stages, family, microbatches, state.hardware, tuning)
            found.append(evaluate(candidate, state.hardware))
    found.sort(key=rank)
    if "zb" in _schedules(state, starts):
        distinct = {own.candidate.stages: own for own in reversed(found) if takes_orders(own, tuning)}
        for own in sorted(distinct.values(), key=rank)[: tuning.ordered_pipelines]:
            found += timed_plans(own, state.hardware, moves="layers", tuning=tuning)
    return found


def sampled_orders(state: SearchState, near: Sequence[Evaluation], scenarios: Scenarios) -> Iterator[Candidate]:
    """The pipelines near the best in zero-bubble orders made for the predicted times and for those of scenarios.

    An order that is made for times to the last bit may wait much where these are a little different; so may one
    whose K is the least with which no transfer is waited for.
    """
    tuning = state.tuning
    if "zb" not in _schedules(state, near):
        return
    starts: dict[tuple[int, tuple[StageChoice, ...]], Candidate] = {}
    sizes: Counter[int] = Counter()
    for own in (own for own in near if takes_orders(own, tuning)):
        key = own.candidate.chain.microbatch, own.candidate.stages
        if key not in starts and sizes[key[0]] < tuning.ordered_pipelines:
            starts[key] = own.candidate
            sizes[key[0]] += 1
    # The fastest of each micro-batch size first: which size is best turns with the orders.
    places = {key: place for place, key in enumerate(starts)}
    firsts = {key[0]: places[key] for key in reversed(starts)}
    chosen = sorted(starts, key=lambda key: (firsts[key[0]] != places[key], places[key]))[
        : tuning.ordered_pipelines
    ]
    hardware = [scenarios.hardware(state.hardware, number) for number in range(tuning.sampled_orders)]
    for candidate in (starts[key] for key in chosen):
        chains = [scenarios.chain(candidate.chain, number) for number in range(tuning.sampled_orders)]
        others = list(zip(chains, hardware, strict=True))
        yield from orders_under(candidate, state.hardware, others, tuning)
        count = candidate.schedule.num_microbatches
        for family, (chain, changed) in itertools.product((FAMILIES["zb"], FAMILIES["1f1b"]), others):
            made = build(chain, candidate.stages, family, count, changed, tuning)
            yield replace(made, chain=candidate.chain)


def quicker_in_scenarios(
    state: SearchState, near: Sequence[Evaluation], scenarios: Scenarios
) -> Iterator[Candidate]:
    """The pipelines near the best whose actions may be moved, in orders that moves make quick in a scenario."""
    tuning, starts = state.tuning, dict[tuple[object, ...], Candidate]()
    for candidate in (own.candidate for own in near):
        if takes_moves(candidate, most=tuning.order_size):
            starts.setdefault((candidate.schedule.name, candidate.chain.microbatch, candidate.stages), candidate)
    spend = MoveEffort(actions=tuning.order_move_actions)
    for candidate in itertools.islice(starts.values(), tuning.varied_moves):
        for number in range(tuning.moved_scenarios):
            chain, hardware = scenarios.chain(candidate.chain, number), scenarios.hardware(state.hardware, number)
            start = evaluate(replace(candidate, chain=chain), hardware)
            quicker = quicker_order(start, hardware, tuning, spend=spend)
            if quicker is not None:
                yield replace(candidate, schedule=quicker.candidate.schedule)


def _type_orders(rows: Sequence[int], most: int) -> list[tuple[int, ...]]:
    """All orders of the accelerators' types, or where these are too many those that keep each type together."""
    counts = Counter(rows)
    orders = math.factorial(len(rows)) // math.prod(math.factorial(count) for count in counts.values())
    if orders <= most:
        return list(dict.fromkeys(itertools.permutations(rows)))
    blocks = itertools.islice(itertools.permutations(counts), most)
    return [tuple(row for kind in block for row in [kind] * counts[kind]) for block in blocks]


def _schedules(state: SearchState, starts: Sequence[Evaluation]) -> set[str]:
    """The schedules to try: zb unless another is asked for, and those near the best."""
    near = {own.candidate.schedule.name for own in starts}
    return near | {"zb"} if state.request.schedule is None and not state.paper else near
