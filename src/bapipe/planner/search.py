"""The joint search: partition × schedule × micro-batch size × depth × replicas, against data parallelism.

All candidates train the same mini-batch (except in the paper's space, where data parallelism updates once per
N micro-batches, and throughput decides). Each is timed by the simulator; the fastest that fits is the plan.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from bapipe.costs.profile import Profile
from bapipe.costs.segments import Chain, make_chain
from bapipe.costs.stage_memory import UnitBytes, stage_weights
from bapipe.costs.stage_time import UnitSeconds
from bapipe.errors import BaPipeError, InfeasibleError
from bapipe.hardware.cluster import Cluster
from bapipe.planner.data_parallel import Estimate, analytic_rivals, at_minibatch, data_parallel_candidate
from bapipe.planner.evaluate import Candidate, Evaluation, Hardware, StageChoice, evaluate
from bapipe.planner.fixed_partitions import THOROUGH, fixed_partitions, paper_candidate
from bapipe.planner.hybrids import balanced_hybrids, copies_of, numbers_of_copies
from bapipe.planner.incumbents import Incumbents, lightest, rank
from bapipe.planner.intra_layer_cuts import refined, split_stages, splits_everywhere
from bapipe.planner.order_search import FEW_FORWARDS, Moves, timed_plans
from bapipe.planner.partition.paper.inter_layer import ideal_time
from bapipe.planner.partition.paper.intra_layer import refine
from bapipe.planner.partition.paper.step_record import Step
from bapipe.planner.pipelines import (
    Family,
    build,
    families_for,
    interleaved_candidate,
    optimal,
    require_layers,
    with_cuts,
)
from bapipe.planner.request import Request, default_minibatch, microbatch_sizes, profiled_range
from bapipe.units import format_bytes

__all__ = ["BRUTE_LAYERS", "BRUTE_STAGES", "Exploration", "explore", "lower_bound"]

BRUTE_LAYERS, BRUTE_STAGES = 10, 4
"""sizes up to which a straight plan is compared with every other cut of its depth"""
_WORTH_MEMORY = 5e-3
"""share of the time that an order made for its stages must save, which mostly holds more than the usual one"""
_TIMED = 3
"""pipelines whose stages are tried in an order made for them"""
_REPLICATED = ("1f1b-sno", "1f1b-so", "1f1b", "zb", "zb-h1", "zb-h2")
"""schedules that run in several pipelines side by side"""
_NEAR = 1.15
"""times the best plan's time up to which that may pay"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Exploration:
    """What the search found."""

    request: Request
    profile: Profile
    hardware: Hardware
    minibatch: int
    best: Evaluation
    considered: tuple[Evaluation, ...]
    """the best of every family, the chosen one included, fastest first; some may not fit"""
    estimates: tuple[Estimate, ...]
    lower_bound: float
    """seconds per mini-batch"""
    ideal: float
    """T of equation (1), seconds per micro-batch of the chosen size"""
    steps: tuple[Step, ...]
    evaluated: int
    """candidates that were simulated"""
    brute_gap: float | None
    """how much slower the plan is than the best cut of the same depth, schedule and order of accelerators, each
    one simulated; None where that was not tried"""


def lower_bound(profile: Profile, cluster: Cluster, minibatch: int) -> float:
    """Perfect split of the mini-batch at each accelerator's best profiled efficiency, no communication."""
    _, _, sizes = profiled_range(profile, cluster)
    rate = 0.0
    for accelerator in cluster.accelerators:
        best = 0.0
        for size in sizes:
            costs = profile.at(accelerator.type, size)
            best = max(best, size / float((costs.forward + costs.backward).sum()))
        rate += best
    return minibatch / rate


def explore(profile: Profile, cluster: Cluster, request: Request | None = None) -> Exploration:
    """Find the fastest plan that fits; raises InfeasibleError saying what would help if none does."""
    request = request or Request()
    paper = request.space == "paper"
    hardware = Hardware(cluster=cluster, optimizer=request.optimizer, overlap_all_reduce=not paper)
    minibatch = request.minibatch or default_minibatch(profile, cluster, request.microbatch)
    sizes = microbatch_sizes(profile, cluster, request, minibatch)
    if request.stages is not None and request.stages > len(cluster):
        raise BaPipeError(
            f"{request.stages} stages need as many accelerators, the cluster has {len(cluster)}; lower --stages"
        )
    found = _search(profile, hardware, request, minibatch, sizes)
    for family, candidate in _side_by_side(profile, hardware, request, minibatch):
        found.add(family, evaluate(candidate, hardware))
    if not found.by_family:
        raise _nothing_to_try(request, len(cluster), minibatch, sizes)
    if found.best is None:
        raise _nothing_fits(found, hardware)
    best = found.best
    estimates = (
        []
        if paper
        else analytic_rivals(best.candidate.chain, hardware, minibatch // best.candidate.chain.microbatch)
    )
    return Exploration(
        request=request,
        profile=profile,
        hardware=hardware,
        minibatch=best.samples if paper else minibatch,
        best=best,
        considered=tuple(sorted(found.by_family.values(), key=rank)),
        estimates=tuple(estimates),
        lower_bound=lower_bound(profile, cluster, best.samples if paper else minibatch),
        ideal=_ideal(best.candidate.chain, cluster),
        steps=best.candidate.steps,
        evaluated=found.count,
        brute_gap=_brute_gap(best, hardware),
    )


def _search(
    profile: Profile, hardware: Hardware, request: Request, minibatch: int, sizes: Sequence[int]
) -> Incumbents:
    """The best of every family at these micro-batch sizes."""
    cluster, paper = hardware.cluster, request.space == "paper"
    types = tuple(dict.fromkeys(item.type for item in cluster.accelerators))
    found = Incumbents()
    chains = {size: make_chain(profile, types, size) for size in sizes}
    ordered = sorted(sizes, key=lambda size: _perfect(chains[size], cluster, minibatch))
    if len(profile.layers) * len(cluster) > THOROUGH and request.strategy == "exact":
        ordered = _promising([chains[size] for size in ordered], hardware, request, minibatch)
    for size in ordered:
        found.bound = 0.0 if paper else _perfect(chains[size], cluster, minibatch)
        for family, candidate in _candidates(chains[size], hardware, request, minibatch, found):
            if found.is_new(candidate):
                found.add(family, evaluate(candidate, hardware))
    timed = lightest(_in_timed_order(found, hardware, request), within=_WORTH_MEMORY)
    held = found.by_family.get("zb")
    if timed and held and (held.short is not None or timed.time < (1 - _WORTH_MEMORY) * held.time):
        found.add("zb", timed)
    return found


def _in_timed_order(found: Incumbents, hardware: Hardware, request: Request) -> list[Evaluation]:
    """The stages of the best straight pipelines in zero-bubble orders made for them, where that is not much."""
    best, made = found.best, []
    tried: dict[tuple[StageChoice, ...], Evaluation] = {}
    for start in sorted(found.by_family.values() if "zb" in found.by_family else (), key=rank):
        candidate = start.candidate
        alone = _straight(candidate.stages) and len(candidate.stages) == candidate.schedule.num_ranks > 1
        again = any(stage.recompute for stage in candidate.stages)
        few = len(candidate.stages) * candidate.schedule.num_microbatches <= FEW_FORWARDS
        if alone and few and not again and (best is None or start.time <= _NEAR * best.time):
            tried.setdefault(candidate.stages, start)
    for number, start in enumerate(list(tried.values())[:_TIMED]):
        moves: Moves = "none"
        if request.strategy == "exact" and not number:
            moves = "slices" if splits_everywhere(start.candidate.chain, hardware, request) else "layers"
        made += timed_plans(start, hardware, moves=moves)
    return made


def _side_by_side(
    profile: Profile, hardware: Hardware, request: Request, minibatch: int
) -> Iterator[tuple[str, Candidate]]:
    """The best pipelines of some accelerators for their share of the mini-batch, as often as there are such."""
    cluster = hardware.cluster
    free = request.stages is None and request.strategy == "exact" and request.space == "full"
    if not free or request.schedule not in (None, *_REPLICATED) or len(profile.layers) * len(cluster) > THOROUGH:
        return
    for number in numbers_of_copies(cluster):
        if minibatch % number:
            continue
        part = replace(cluster, accelerators=cluster.accelerators[: len(cluster) // number])
        try:
            own = replace(request, minibatch=minibatch // number, stages=len(part))
            sizes = microbatch_sizes(profile, part, own, minibatch // number)
            found = _search(profile, replace(hardware, cluster=part), own, minibatch // number, sizes)
        except BaPipeError:
            continue
        for evaluation in sorted(found.by_family.values(), key=rank)[:_TIMED]:
            if evaluation.short is None and evaluation.candidate.schedule.name in _REPLICATED:
                for candidate in copies_of(evaluation.candidate, number, cluster):
                    yield f"{candidate.schedule.name}, hybrid", candidate


def _brute_gap(best: Evaluation, hardware: Hardware) -> float | None:
    """The plan's simulated time over the best of all cuts of its depth, for small straight pipelines."""
    candidate = best.candidate
    chain, stages = candidate.chain, candidate.stages
    interleaved = candidate.schedule.num_ranks != len(stages)
    if interleaved or len(chain) > BRUTE_LAYERS or not 2 <= len(stages) <= BRUTE_STAGES or not _straight(stages):
        return None
    fastest = best.time
    for cuts in combinations(range(len(chain) - 1), len(stages) - 1):
        trial = with_cuts(stages, (*cuts, len(chain) - 1))
        evaluation = evaluate(replace(candidate, stages=trial), hardware)
        if evaluation.short is None:
            fastest = min(fastest, evaluation.time)
    return best.time / fastest - 1


def _promising(chains: list[Chain], hardware: Hardware, request: Request, minibatch: int) -> list[int]:
    """Of a large problem's micro-batch sizes the one that a straight pipeline or data parallelism likes best."""
    families = families_for(hardware.cluster, paper=False, cap=request.cap)
    capped = families.get("1f1b") if request.cap is not None else None
    family = capped or list(families.values())[1]
    times: dict[int, float] = {}
    for chain in chains:
        microbatches = minibatch // chain.microbatch
        candidates = [at_minibatch(chain, hardware, minibatch)]
        for _, stages in _optimal(chain, hardware, family.straight(), microbatches, request):
            candidates.append(build(chain, stages, family, microbatches, hardware))
        evaluations = [evaluate(candidate, hardware) for candidate in candidates if candidate is not None]
        fitting = [evaluation.time for evaluation in evaluations if evaluation.short is None]
        times[chain.microbatch] = min(fitting, default=math.inf)
    return sorted(times, key=lambda size: (times[size], size))[:1]


def _perfect(chain: Chain, cluster: Cluster, minibatch: int, depth: int | None = None) -> float:
    """No plan with this micro-batch size (and so many accelerators) is faster: perfect split, no communication."""
    return minibatch / chain.microbatch * _ideal(chain, cluster, depth)


def _ideal(chain: Chain, cluster: Cluster, fastest: int | None = None) -> float:
    """T of equation (1): seconds per micro-batch if the network could be split perfectly (over the fastest)."""
    whole = UnitSeconds.of(chain).work.sum(axis=1)
    return ideal_time(sorted(float(whole[chain.row(item.type)]) for item in cluster.accelerators)[:fastest])


def _candidates(
    chain: Chain, hardware: Hardware, request: Request, minibatch: int, found: Incumbents
) -> Iterator[tuple[str, Candidate]]:
    """All candidates of one micro-batch size, each with the family it competes in."""
    cluster, count = hardware.cluster, len(hardware.cluster)
    paper = request.space == "paper"
    wants_dp = request.schedule in (None, "data-parallel") and request.strategy in ("exact", "bapipe", "dp")
    if wants_dp and request.stages in (None, 1):
        if paper:
            yield "data-parallel", data_parallel_candidate(chain, hardware, 1)
        else:
            whole = at_minibatch(chain, hardware, minibatch)
            if whole is not None:
                plain = whole.schedule.num_microbatches == count
                yield "data-parallel" if plain else "data-parallel, accumulated", whole
    if request.strategy == "dp" or request.schedule == "data-parallel":
        return
    yield from _pipelines(chain, hardware, request, minibatch, found)
    if request.stages is not None or not splits_everywhere(chain, hardware, request):
        return
    # Divided layers make other depths worth while than whole ones, and the exact search has one depth to offer.
    for depth in range(min(count, len(chain)), 0, -1):
        if found.best is not None and found.best.time <= _perfect(chain, cluster, minibatch, depth):
            break
        yield from _pipelines(chain, hardware, replace(request, stages=depth), minibatch, found)


def _pipelines(
    chain: Chain, hardware: Hardware, request: Request, minibatch: int, found: Incumbents
) -> Iterator[tuple[str, Candidate]]:
    """The pipelines of one micro-batch size, of the depth that is asked for or of any."""
    cluster, count = hardware.cluster, len(hardware.cluster)
    paper = request.space == "paper"
    microbatches = minibatch // chain.microbatch
    wanted = "gpipe" if request.strategy == "gpipe" else request.schedule
    known = families_for(cluster, paper=paper, wanted=wanted, cap=request.cap)
    families = {name: family for name, family in known.items() if wanted in (None, family.schedule)}
    if not families and wanted != "interleaved":
        raise BaPipeError(
            f"schedule {wanted} does not suit these accelerators{' in the space of the paper' if paper else ''}; "
            f"known here: {', '.join(known)}"
        )
    fixed = fixed_partitions(chain, hardware, request)
    plain: list[tuple[Chain, list[StageChoice]]] = []
    """the best cuts of 1f1b that recompute nothing, which are zb's as well"""
    hybrids: list[tuple[float, tuple[StageChoice, ...]]] = []
    for name, family in families.items():
        if found.hopeless(name):
            continue
        if name == "zb" and plain:
            for own_chain, cut in plain:
                yield name, build(own_chain, cut, family, microbatches, hardware)
            continue
        for stages in fixed:
            if (_straight(stages) or family.replicas) and not _whole_everywhere(stages):
                again = tuple(replace(stage, recompute=family.recompute == "always") for stage in stages)
                yield _named(name, again), build(chain, again, family, microbatches, hardware)
        if request.strategy in ("exact", "gpipe"):
            for own_chain, cut in _optimal(chain, hardware, family, microbatches, request):
                if _whole_everywhere(cut):
                    continue  # data parallelism, a candidate of its own
                if name == "1f1b" and _straight(cut) and not any(stage.recompute for stage in cut):
                    plain.append((own_chain, cut))
                yield _named(name, cut), build(own_chain, cut, family, microbatches, hardware)
            if _tries_replicas(chain, count, family) and not paper and request.stages is None:
                hybrids = hybrids or balanced_hybrids(chain, hardware, microbatches)
                within = math.inf if found.best is None else _NEAR * found.best.time
                for stages in (stages for time, stages in hybrids if time <= within):
                    yield _named(name, stages), build(chain, stages, family, microbatches, hardware)
        if request.strategy == "bapipe" or (request.strategy == "exact" and len(chain) * count <= THOROUGH):
            candidate = paper_candidate(chain, hardware, family, microbatches, request)
            if candidate is not None:
                yield _named(name, candidate.stages), candidate
    if (
        (wanted == "interleaved" or (wanted is None and request.stages is None))
        and not paper
        and request.strategy == "exact"
        and not found.hopeless("interleaved")
    ):
        yield from _interleaved(chain, hardware, microbatches, request, found)


def _named(family: str, stages: Sequence[StageChoice]) -> str:
    return family if _straight(stages) else f"{family}, hybrid"


def _whole_everywhere(stages: Sequence[StageChoice]) -> bool:
    return len(stages) == 1 and len(stages[0].accelerators) > 1


def _straight(stages: Sequence[StageChoice]) -> bool:
    return all(len(stage.accelerators) == 1 for stage in stages)


def _optimal(
    chain: Chain, hardware: Hardware, family: Family, microbatches: int, request: Request
) -> Iterator[tuple[Chain, list[StageChoice]]]:
    """The exact optimum: straight, with replicas, and with layers divided, at a given depth where any may be."""
    paper = request.space == "paper"
    count = len(hardware.cluster)
    depth = request.stages or (count if paper else None)
    if depth is not None:
        require_layers(chain, depth)
    levels = [True] if hardware.cluster.between is None else [True, False]
    wide = _tries_replicas(chain, count, family) and not paper and depth is None and count > 1
    widths = [False, True] if wide else [False]
    for fast in levels:
        for wide in widths:
            try:
                stages = optimal(
                    chain, hardware, family, microbatches, num_stages=depth, replicas=wide, fast_links=fast
                )
            except InfeasibleError:
                if wide or (len(chain) * count > THOROUGH and request.schedule is None):
                    continue
                stages = optimal(
                    chain,
                    hardware,
                    family,
                    microbatches,
                    num_stages=depth or min(count, len(chain)),
                    unlimited=True,
                    fast_links=fast,
                )
            yield chain, stages
            if not request.split_layers or wide:
                continue
            if not splits_everywhere(chain, hardware, request):
                cuts = [stage.last for stage in stages[:-1]]
                beside = sorted({chain.units[unit].layer for cut in cuts for unit in (cut, cut + 1)})
                yield from split_stages(refine(chain, beside), stages, hardware, family, microbatches, fast)
            elif depth is not None:
                yield from split_stages(refined(chain), stages, hardware, family, microbatches, fast)


def _tries_replicas(chain: Chain, count: int, family: Family) -> bool:
    """Replicas make the search dear; a large problem tries them under the schedule that gains most by them."""
    return family.replicas and (len(chain) * count <= THOROUGH or family.schedule == "1f1b-so")


def _interleaved(
    chain: Chain, hardware: Hardware, microbatches: int, request: Request, found: Incumbents
) -> Iterator[tuple[str, Candidate]]:
    """Of two or three stages each; where none fits, recomputing ones: the more stages, the less one needs."""
    ranks = request.stages or len(hardware.cluster)
    forced = request.schedule == "interleaved"
    if ranks < 2 or (microbatches < ranks and not forced):
        return
    made = []
    for virtual in (2, 3, 4):
        try:
            made.append(interleaved_candidate(chain, hardware, microbatches, ranks=ranks, virtual=virtual))
        except BaPipeError:
            if forced and virtual == 2:
                raise
            break
    for candidate in made[:2]:
        yield "interleaved", candidate
    held = found.by_family.get("interleaved")
    if held is None or held.short is not None:
        for candidate in made:
            again = tuple(replace(stage, recompute=True) for stage in candidate.stages)
            label = f"{candidate.label}, recomputing"
            yield "interleaved with recomputation", replace(candidate, stages=again, label=label)


def _nothing_to_try(request: Request, count: int, minibatch: int, sizes: Sequence[int]) -> BaPipeError:
    """What of the request leaves no candidate."""
    if request.schedule == "data-parallel" or request.strategy == "dp":
        each = count * min(sizes)
        fewer = minibatch // each * each
        others = f"{fewer} or {fewer + each}" if fewer else f"{each}"
        return BaPipeError(
            f"data parallelism deals whole micro-batches evenly to {count} accelerators, and {minibatch} samples "
            f"are not a multiple of {count} x {min(sizes)}; make --global-batch {others}, or change --micro-batch"
        )
    if request.schedule == "interleaved" and count < 2:
        return BaPipeError("interleaved needs at least 2 accelerators, the cluster has 1; leave --schedule out")
    if request.schedule == "interleaved" and request.stages == 1:
        return BaPipeError("interleaved needs at least 2 stages, each in parts; leave --stages out")
    asked = request.schedule or request.strategy
    return BaPipeError(f"nothing can be tried with {asked} and {minibatch} samples; leave --schedule out")


def _nothing_fits(found: Incumbents, hardware: Hardware) -> InfeasibleError:
    """Which stage of the closest candidate lacks how much, and what would help."""
    closest = min((item for item in found.by_family.values() if item.short is not None), key=rank, default=None)
    if closest is None or closest.short is None:
        fits = ", ".join(evaluation.candidate.label for evaluation in found.by_family.values())
        return InfeasibleError(
            f"nothing that `bapipe run` runs yet was found; planned only: {fits}; force --schedule 1f1b-so"
        )
    stage, short = closest.short
    choice, chain = closest.candidate.stages[stage], closest.candidate.chain
    together = [item for item in closest.candidate.stages if item.accelerators == choice.accelerators]
    names = chain.profile.layers
    first, last = chain.units[choice.first].layer, chain.units[choice.last].layer
    units = UnitBytes.of(chain)
    each = units.weights * hardware.static_copies() + units.stash * closest.live[stage]
    heaviest = chain.units[choice.first + int(each[choice.first : choice.last + 1].argmax())].layer
    need = closest.memory[stage]
    more = f", with {len(together) - 1} more on its accelerator" if len(together) > 1 else ""
    helps = [f"accelerators of {format_bytes(need)}"]
    if chain.microbatch > 1:
        helps.append("a smaller --micro-batch (profile smaller sizes if they are missing)")
    if hardware.optimizer != "sgd":
        held = sum(stage_weights(chain, item.first, item.last) for item in together)
        saved = held * (hardware.static_copies() - 2)
        helps.append(f"--optimizer sgd (saves {format_bytes(saved)} there)")
    if len(closest.candidate.stages) < len(chain):
        helps.append("more accelerators")
    return InfeasibleError(
        f"nothing fits: the closest, {closest.candidate.label} at micro-batch {chain.microbatch}, is "
        f"{format_bytes(short)} short on stage {stage} (layers '{names[first].name[:60]}' to "
        f"'{names[last].name[:60]}', the heaviest '{names[heaviest].name[:60]}'{more}), which needs "
        f"{format_bytes(need)} of {format_bytes(closest.capacity[stage])}; any of these would help: "
        + "; ".join(helps)
    )
