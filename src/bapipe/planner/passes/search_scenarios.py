"""What the search by simulation finds where layers and links take the times of a scenario."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from bapipe.planner.candidate import Candidate
from bapipe.planner.cut_search import CutSearch, Shape, family_of
from bapipe.planner.effort import Effort
from bapipe.planner.evaluate import Evaluation
from bapipe.planner.incumbents import rank
from bapipe.planner.passes.move_actions import move_actions
from bapipe.planner.passes.reorder import reorder_pipelines
from bapipe.planner.passes.search_cuts import climb_starts, may_search
from bapipe.planner.passes.try_sizes import try_looped_pipelines
from bapipe.planner.plan_climb import climb
from bapipe.planner.scenarios import Scenarios
from bapipe.planner.state import SearchState

__all__ = ["best_in_scenarios"]


def best_in_scenarios(
    state: SearchState, known: Sequence[Evaluation], scenarios: Scenarios, *, looped: Collection[int]
) -> Iterator[Candidate]:
    """The fastest of every shape near the best, and the fastest plans of each scenario.

    What is best by the predicted times need not be near what is best where a link is slower: so each scenario is
    searched as if its times were the predicted ones, from those that are known and fastest in it on. The effort is
    counted in actions, whatever the request says, so that the candidates are the same on every machine. Pipelines
    with several stages on an accelerator take long to search: only the scenarios `looped` are searched for them.
    """
    if not may_search(state) or not known:
        return
    tuning = state.tuning
    listing = CutSearch(state.narrowed(state.request, sizes=state.sizes), Effort(steps=tuning.search_steps))
    reach = (1 + state.margin / 2) / state.best.throughput
    shapes = [shape for shape in listing.shapes(state.tried_sizes) if shape.soonest <= reach]
    starts = [*known, *_best_of_shapes(listing, shapes, reach)]
    yield from (own.candidate for own in starts[len(known) :])
    times = scenarios.times(starts, state.hardware)
    for number in range(len(scenarios)):
        own = _in_scenario(state, scenarios, number)
        for index in times[:, number].argsort(kind="stable").tolist()[: tuning.scenario_starts]:
            candidate = starts[index].candidate
            chain = own.chains.get(candidate.chain.microbatch)
            if chain is not None and chain.units == candidate.chain.units:
                own.consider(family_of(candidate), replace(candidate, chain=chain))
        search = CutSearch(own, Effort(steps=tuning.scenario_search_steps))
        if listing.open == 0.0:
            for start in climb_starts(own):
                climb(own, search, start)
        search.sweep(search.retimed(shapes))
        if state.request.schedule in (None, "zb"):
            reorder_pipelines(own)
        if number in looped:
            for size in own.tried_sizes:
                try_looped_pipelines(own, own.scope(size))
            move_actions(own)
        found = sorted((item for item in own.incumbents.by_family.values() if item.short is None), key=rank)
        for candidate in (item.candidate for item in found[: tuning.scenario_bests]):
            chain = state.chain(candidate.chain.microbatch)
            if chain.units == candidate.chain.units:
                yield replace(candidate, chain=chain)


def _best_of_shapes(search: CutSearch, shapes: Sequence[Shape], reach: float) -> list[Evaluation]:
    """The fastest of every shape, by the first of its usual orders that fits, from those of fewest actions on."""
    found = []
    orders = [list(shape.space.usual(shape.cases.counts, shape.cases.microbatches)) for shape in shapes]
    for place in sorted(range(len(shapes)), key=lambda place: orders[place][0].actions):
        for order in orders[place]:
            best = search.try_order(shapes[place].space, shapes[place].cases, order, below=reach)
            if best is not None:
                found.append(best)
                break
    return found


def _in_scenario(state: SearchState, scenarios: Scenarios, number: int) -> SearchState:
    """A search whose predicted times are those of the scenario; nothing is found yet."""
    return SearchState(
        profile=state.profile,
        hardware=scenarios.hardware(state.hardware, number),
        request=replace(state.request, effort="normal"),
        global_batch=state.global_batch,
        sizes=state.sizes,
        tuning=state.tuning,
        chains={size: scenarios.chain(state.chain(size), number) for size in state.tried_sizes},
        tried_sizes=state.tried_sizes,
    )
