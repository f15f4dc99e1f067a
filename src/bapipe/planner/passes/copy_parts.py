"""Pass: on a large cluster, copies of a plan that is searched for a part of it.

A cluster of hundreds of accelerators is divided into equal parts. For every size of part the pipelines of each
micro-batch size are outlined, without simulating all micro-batches; the best sizes of part are then searched as
clusters of their own, and their plans run as data-parallel copies whose gradients are summed between the parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from bapipe.errors import BaPipeError, InfeasibleError
from bapipe.planner.candidate import Candidate, StageChoice
from bapipe.planner.cluster_parts import Part, copies_on, copies_wanted, mixed, parts_of
from bapipe.planner.data_parallel import data_parallel_candidate
from bapipe.planner.effort import effort_of
from bapipe.planner.evaluate import evaluate
from bapipe.planner.hybrids import LOOPED, REPLICATED
from bapipe.planner.outline import Outline, outline
from bapipe.planner.passes.recompute_layers import recompute_layers
from bapipe.planner.passes.reorder import reorder_pipelines
from bapipe.planner.passes.try_sizes import try_sizes
from bapipe.planner.pipelines import FAMILIES, Family, build, optimal, permitted
from bapipe.planner.request import Request
from bapipe.planner.state import SearchState

__all__ = ["copy_parts", "copyable", "family_of_plan", "outlines"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Trial:
    """The outline of one pipeline, copied to all parts."""

    part: Part
    size: int
    found: Outline


def copy_parts(state: SearchState) -> None:
    """Add copies of the best plans for parts of a large cluster, and data parallelism over all of it."""
    if not copies_wanted(state) or (mixed(state.cluster) and _little_to_gain(state)):
        return
    trials = list(_trials(state))
    fitting = sorted((trial for trial in trials if trial.found.fits), key=lambda trial: trial.found.time)
    if not fitting:
        for trial in trials[-1:]:
            state.incumbents.add(_family(trial.found.evaluation.candidate), trial.found.evaluation)
        return
    best = state.incumbents.best
    fastest = fitting[0].found.time if best is None else min(best.time, fitting[0].found.time)
    tuning, more = state.tuning, effort_of(state.request.effort, state.tuning).more
    near = [trial for trial in fitting if more > 1 or trial.found.time <= tuning.near_copies * fastest]
    parts = list(dict.fromkeys(trial.part for trial in near))[: more * tuning.searched_parts]
    if not mixed(state.cluster):
        # The smallest is quickly searched, and other schedules and cuts may suit it better than the outlined.
        parts.append(min((trial.part for trial in fitting), key=len))
    for part in dict.fromkeys(parts):
        sizes = list(dict.fromkeys(trial.size for trial in fitting if trial.part is part))
        _search_part(state, part, tuple(sizes[: more * tuning.part_sizes]))


def _little_to_gain(state: SearchState) -> bool:
    """Whether perfect use of all accelerators is hardly faster than the best plan so far."""
    best = state.incumbents.best
    perfect = min(state.perfect_time(state.chain(size)) for size in state.sizes)
    return best is not None and best.time * (1 - state.tuning.worth_dividing) <= perfect


def _trials(state: SearchState) -> Iterator[_Trial]:
    """Outlines of pipelines on parts of every size; ends where larger parts have stopped to be faster."""
    fastest, slower = float("inf"), 0
    enough = 1 if mixed(state.cluster) else state.tuning.slower_parts
    searched_whole = state.thorough(len(state.profile.layers)) and not mixed(state.cluster)
    for part in parts_of(state.cluster, state.global_batch):
        if len(part) > len(state.profile.layers) or slower == enough:
            break
        if not _may_fit(state, part) or (part.copies == 1 and searched_whole):
            continue
        trials = list(_of_part(state, part))
        yield from trials
        best = min((trial.found.time for trial in trials if trial.found.fits), default=float("inf"))
        if best < float("inf"):
            slower = 0 if best < (1 - state.tuning.as_fast) * fastest else slower + 1
        fastest = min(fastest, best)


def _may_fit(state: SearchState, part: Part) -> bool:
    """Whether the part has memory for one copy of weights, gradients and optimizer state."""
    chain = state.chain(min(state.sizes))
    needed = float(state.static_bytes(chain).sum())
    return needed <= sum(part.cluster.type_of(index).memory for index in range(len(part)))


def _of_part(state: SearchState, part: Part) -> Iterator[_Trial]:
    """The pipelines of each micro-batch size, most promising first, until no size can be faster."""
    share = state.narrowed(
        replace(state.request, global_batch=state.global_batch // part.copies),
        sizes=tuple(size for size in state.sizes if state.global_batch // part.copies % size == 0),
        cluster=part.cluster,
    )
    fastest = float("inf")
    for size in sorted(share.sizes, key=lambda size: share.perfect_time(share.chain(size))):
        if share.perfect_time(share.chain(size)) >= fastest:
            break
        for found in outlines(state, share, part, size):
            yield _Trial(part=part, size=size, found=found)
            if found.fits:
                fastest = min(fastest, found.time)


def outlines(state: SearchState, share: SearchState, part: Part, size: int) -> Iterator[Outline]:
    chain, microbatches, request = share.chain(size), share.global_batch // size, state.request
    if len(part) == 1:
        if request.schedule in (None, "data-parallel"):
            candidate = copies_on(part, data_parallel_candidate(chain, share.hardware, microbatches))
            evaluation = evaluate(candidate, state.hardware)
            yield Outline(time=evaluation.time, evaluation=evaluation)
        return
    for family in _families(request, several_types=mixed(part.cluster)):
        tried: list[list[StageChoice]] = []
        for link in part.cluster.stage_links:
            try:
                stages = optimal(chain, share.hardware, family, microbatches, link=link, tuning=state.tuning)
            except InfeasibleError:
                continue
            if stages in tried:
                continue
            tried.append(stages)
            found = outline(
                chain,
                stages,
                family,
                microbatches,
                part=part,
                hardware=state.hardware,
                own=share.hardware,
                tuning=state.tuning,
            )
            if found is not None:
                yield found


def family_of_plan(request: Request, candidate: Candidate) -> Family | None:
    """The family of schedules that makes the plan of a part for other numbers of micro-batches; None: data
    parallelism."""
    name = candidate.schedule.name
    return replace(FAMILIES[name], cap=request.cap if name == "1f1b" else None) if name in FAMILIES else None


def _families(request: Request, *, several_types: bool = False) -> list[Family]:
    """The schedules that sizes of parts are compared by: what is asked for, or a few that fill their bubbles, hold
    little or may recompute."""
    names = ["1f1b", "zb", "1f1b-sno", "zb-h1"] if request.schedule is None else [request.schedule]
    if several_types:
        names = names[:2]  # types may follow one another in any order, so each takes longer
    known = permitted({name: FAMILIES[name] for name in names if name in FAMILIES}, request)
    return [replace(family.unreplicated(), cap=request.cap) for family in known.values()]


def _search_part(state: SearchState, part: Part, sizes: tuple[int, ...]) -> None:
    """Add copies of the best plans that the part alone has at these micro-batch sizes."""
    request = replace(state.request, global_batch=state.global_batch // part.copies)
    share = state.narrowed(request, sizes=sizes, cluster=part.cluster, to_copy=True)
    most = state.tuning.whole_actions // len(part)
    share.tried_sizes = tuple(size for size in sizes if share.global_batch // size <= most)
    try:
        for run in (try_sizes, reorder_pipelines, recompute_layers):
            run(share)
    except BaPipeError:
        return
    for candidate in copyable(share):
        _add_copies(state, part, candidate)
        if candidate.schedule.name not in LOOPED:
            _on_fewer_parts(state, part, candidate)


def _add_copies(state: SearchState, part: Part, candidate: Candidate) -> None:
    """Add the plan on every part, with its pipelines on few nodes each, or the replicas of its stages."""
    nodes = {state.cluster.place(index) for index in range(len(state.cluster))}
    for near in (False, True) if len(nodes) > 1 and part.copies > 1 else (False,):
        copied = copies_on(part, candidate, near=near)
        state.incumbents.add(_family(copied), evaluate(copied, state.hardware))


def _on_fewer_parts(state: SearchState, part: Part, candidate: Candidate) -> None:
    """Add the plan with fewer copies, a half each time, as long as that may be faster than the best so far.

    Fewer accelerators sum their gradients sooner, and each copy has more micro-batches to fill its pipeline.
    """
    chain = candidate.chain
    microbatches, own = state.global_batch // chain.microbatch, replace(state.hardware, cluster=part.cluster)
    family, copies = family_of_plan(state.request, candidate), part.copies
    while copies > 1:
        copies = max(number for number in range(1, copies // 2 + 1) if microbatches % number == 0)
        best, each = state.incumbents.best, microbatches // copies
        soonest = state.perfect_time(chain) * len(state.cluster) / (copies * len(part))
        if len(part) * each > state.tuning.whole_actions or (best is not None and best.time <= soonest):
            return
        again = (
            data_parallel_candidate(chain, own, each)
            if family is None
            else build(chain, candidate.stages, family, each, own, state.tuning)
        )
        _add_copies(state, part.first(copies), again)


def copyable(share: SearchState) -> list[Candidate]:
    """The plans of a part that run in copies, from the fastest on.

    Data parallelism on a part is what it is on all parts, and those of one accelerator have no other.
    """
    found, names = [], REPLICATED if share.straight else (*REPLICATED, *LOOPED)
    for own in share.incumbents.ranked():
        candidate = own.candidate
        name, alone = candidate.schedule.name, len(share.cluster) == 1
        runs = name == "data-parallel" if alone else name in names and len(candidate.stages) > 1
        if own.short is None and runs:
            found.append(candidate)
    return found[: share.tuning.replicated_pipelines]


def _family(candidate: Candidate) -> str:
    if len(candidate.stages) == 1:
        accumulates = candidate.schedule.num_microbatches > 1
        return "data-parallel, accumulated" if accumulates else "data-parallel"
    return f"{candidate.schedule.name}, hybrid"
