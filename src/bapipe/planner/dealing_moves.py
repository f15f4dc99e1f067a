"""From a dealing to the best near it: a micro-batch to another replica, or two that change places."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from bapipe.planner.candidate import Candidate
from bapipe.planner.cut_search import CutSearch
from bapipe.planner.evaluate import Evaluation
from bapipe.planner.stage_dealing import dealt_words
from bapipe.planner.state import SearchState
from bapipe.schedule.dealing import Dealing, shortest_dealing, takers
from bapipe.schedule.generators import capped

__all__ = ["improve_dealing"]

Dealings = tuple[Dealing, ...]


def improve_dealing(state: SearchState, search: CutSearch) -> None:
    """Change the best plan's dealing as long as the simulator says that it gets faster, and the effort reaches.

    Dealing by speed suits a stage that always has work; filling and draining may ask for another. Data parallelism
    neither fills nor drains, and zero-bubble orders replicate whole pipelines: both stay as they are.
    """
    for _ in range(state.tuning.dealing_moves):
        best = search.best
        if best is None or not _has_moves(best):
            return
        for trial in _near(best):
            if search.spent:
                return
            search.offer(trial)
            if search.best is not best:
                break
        if search.best is best:
            return


def _has_moves(evaluation: Evaluation) -> bool:
    candidate = evaluation.candidate
    schedule = candidate.schedule
    straight = len(candidate.stages) > 1 and not schedule.name.startswith("zb") and candidate.copies == 1
    return straight and schedule.dealing is not None


def _near(evaluation: Evaluation) -> Iterator[Candidate]:
    """The same with one step in one stage's dealing, or in how many micro-batches it has in flight."""
    candidate = evaluation.candidate
    schedule = candidate.schedule
    stages, microbatches = schedule.num_stages, schedule.num_microbatches
    dealing, caps = schedule.dealing, schedule.caps
    assert dealing is not None
    assert caps is not None
    counts = [len(stage.accelerators) for stage in candidate.stages]

    def made(trial: Dealings, held: tuple[int, ...]) -> Candidate:
        other = capped(stages, microbatches, held, name=schedule.name, replicas=counts, dealing=trial)
        label = candidate.label.partition(", micro-batches ")[0]
        return replace(candidate, schedule=other, label=f"{label}, micro-batches {dealt_words(other)}")

    for stage, own in enumerate(dealing):
        if not own:
            continue
        for cap in (caps[stage] - 1, caps[stage] + 1):
            if 1 <= cap <= microbatches:
                yield made(dealing, (*caps[:stage], cap, *caps[stage + 1 :]))
        taken = takers(own, counts[stage], microbatches).tolist()
        for trial in _moved(taken, counts[stage]):
            yield made((*dealing[:stage], trial, *dealing[stage + 1 :]), caps)


def _moved(taken: list[int], replicas: int) -> Iterator[Dealing]:
    """Dealings that differ in who takes one micro-batch, or in two neighbours that change places."""
    seen = set[Dealing]()
    for place, other in itertools.product(range(len(taken)), range(replicas)):
        one = [*taken[:place], other, *taken[place + 1 :]]
        two = [*taken[:place], *taken[place : place + 2][::-1], *taken[place + 2 :]]
        for trial in (one, two):
            made = shortest_dealing(tuple(trial), replicas)
            if trial != taken and made and made not in seen and len(set(made)) == replicas:
                seen.add(made)
                yield made
