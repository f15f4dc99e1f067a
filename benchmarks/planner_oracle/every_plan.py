"""The fastest plan by trying every one: cuts, orders of accelerators, replica sets, in-flight micro-batches.

Shares with the planner the cost of a stage, the simulator and the memory model, and nothing of its search. A plan
is left out without being simulated only where a bound shows that it cannot be faster than one that fits, or that a
stage's weights and in-flight activations alone exceed its memory.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from random_problems import Problem

from bapipe.costs.planned_optimizer import planned_optimizer
from bapipe.costs.segments import Chain, make_chain
from bapipe.costs.stage_memory import stage_bytes
from bapipe.hardware.cluster import Cluster
from bapipe.planner.candidate import Candidate, Hardware, StageChoice
from bapipe.planner.candidate_costs import stage_costs
from bapipe.planner.evaluate import Evaluation, evaluate
from bapipe.planner.plan_network import network_of
from bapipe.planner.request import microbatch_sizes
from bapipe.schedule.actions import Kind, Schedule
from bapipe.schedule.dealing import Dealing, deal_evenly
from bapipe.schedule.generators import capped, with_update
from bapipe.schedule.inflight import stage_caps
from bapipe.schedule.zero_bubble import zero_bubble
from bapipe.simulator.action_costs import Costs
from bapipe.simulator.scenario_times import ManyCosts, many_times

__all__ = ["Best", "fastest_plan"]

Floats = np.ndarray


@dataclass
class Best:
    """The fastest plan that fits, as far as was tried."""

    evaluation: Evaluation | None = None
    simulated: int = 0
    """plans whose time was simulated"""
    weighed: int = 0
    """plans whose memory was weighed"""

    @property
    def rate(self) -> float:
        return 0.0 if self.evaluation is None else self.evaluation.throughput


def fastest_plan(problem: Problem) -> Best:
    """Of all micro-batch sizes; `evaluation` is None where nothing fits."""
    cluster, request = problem.cluster, problem.request
    types = tuple(dict.fromkeys(item.type for item in cluster.accelerators))
    hardware = Hardware(cluster=cluster, optimizer=planned_optimizer(problem.profile, types, request.optimizer))
    best = Best()
    assert request.global_batch is not None
    for size in microbatch_sizes(problem.profile, cluster, request, request.global_batch):
        chain = make_chain(problem.profile, types, size)
        count = request.global_batch // size
        shapes = [_Shape(chain, hardware, count, counts, orders) for counts, orders in _placements(problem)]
        # The order in which shapes are tried changes how much is left out, not what is found.
        for shape in sorted(shapes, key=lambda own: own.soonest):
            for schedule in _schedules(problem, shape.counts, count):
                shape.try_all(schedule, best)
            if shape.is_unlike() and problem.request.dealing == "speed":
                for schedule in _dealt_schedules(problem, shape.counts, count):
                    shape.try_all(schedule, best)
    return best


def _placements(problem: Problem) -> Iterator[tuple[tuple[int, ...], list[tuple[int, ...]]]]:
    """Replicas of each stage, and all orders of accelerators that differ in type or node."""
    cluster, request = problem.cluster, problem.request
    replicas = request.stages is None and request.schedule in (None, "1f1b", "1f1b-so", "1f1b-sno")
    layers = len(problem.profile.layers)
    for used in range(1, len(cluster) + 1):
        orders = _orders(cluster, used)
        for cuts in itertools.product((False, True), repeat=used - 1):
            edges = [0, *(index + 1 for index, cut in enumerate(cuts) if cut), used]
            counts = tuple(b - a for a, b in itertools.pairwise(edges))
            if len(counts) > layers or (not replicas and max(counts) > 1):
                continue
            if request.stages is not None and len(counts) != request.stages:
                continue
            alone = len(counts) == 1 and used > 1
            if alone and request.schedule is not None:
                continue
            yield counts, orders


def _orders(cluster: Cluster, used: int) -> list[tuple[int, ...]]:
    """One of each set of orders that differ only in the names of like accelerators or nodes."""
    found: dict[tuple[object, ...], tuple[int, ...]] = {}
    for order in itertools.permutations(range(len(cluster)), used):
        nodes: dict[str, int] = {}
        names = [cluster.accelerators[index] for index in order]
        key = tuple((item.type, nodes.setdefault(item.node, len(nodes))) for item in names)
        found.setdefault(key, order)
    return list(found.values())


def _schedules(problem: Problem, counts: tuple[int, ...], microbatches: int) -> Iterator[Schedule]:
    wanted = problem.request.schedule
    if len(counts) == 1 and counts[0] > 1:
        if microbatches % counts[0] == 0:
            yield capped(1, microbatches, list(counts), name="data-parallel", replicas=counts)
        return
    if wanted == "gpipe":
        yield capped(len(counts), microbatches, [microbatches] * len(counts), name="gpipe", replicas=counts)
    elif wanted in ("1f1b-so", "1f1b-sno"):
        caps = [max(1, min(cap, microbatches)) for cap in stage_caps(wanted, counts, microbatches)]
        yield capped(len(counts), microbatches, caps, name=wanted, replicas=counts)
    if wanted in (None, "1f1b"):
        for caps in _caps(counts, microbatches):
            yield capped(len(counts), microbatches, caps, replicas=counts)
    if wanted in (None, "zb") and max(counts) == 1:
        for caps in _caps(counts, microbatches):
            yield zero_bubble(len(counts), microbatches, caps)
            if caps[0] > caps[-1]:
                yield zero_bubble(len(counts), microbatches, caps, delays=[0] * len(caps))


def _dealt_schedules(problem: Problem, counts: tuple[int, ...], microbatches: int) -> Iterator[Schedule]:
    """As `_schedules`, with every number of micro-batches on every replica, evenly over the global batch."""
    wanted, alone = problem.request.schedule, len(counts) == 1
    if wanted not in (None, "1f1b", "1f1b-so", "1f1b-sno") or max(counts) > microbatches:
        return
    every = [list(_dealings(count, microbatches)) for count in counts]
    for dealing in itertools.product(*every):
        if not any(dealing):
            continue
        if alone:
            yield capped(1, microbatches, [1], name="data-parallel", replicas=counts, dealing=dealing)
            continue
        caps = [max(1, min(cap, microbatches)) for cap in stage_caps(wanted or "1f1b", counts, microbatches)]
        # Otherwise than in turn, in-flight counts between multiples of the replicas differ.
        steps = tuple(1 if own else count for own, count in zip(dealing, counts, strict=True))
        for own in _caps(steps, microbatches) if wanted in (None, "1f1b") else (caps,):
            yield capped(len(counts), microbatches, own, name=wanted or "1f1b", replicas=counts, dealing=dealing)


def _dealings(replicas: int, microbatches: int) -> Iterator[Dealing]:
    """Every number of micro-batches on every replica, none without one."""
    for ends in itertools.combinations(range(1, microbatches), replicas - 1):
        shares = [high - low for low, high in itertools.pairwise([0, *ends, microbatches])]
        yield deal_evenly(shares)


def _caps(counts: tuple[int, ...], microbatches: int) -> Iterator[tuple[int, ...]]:
    """In-flight micro-batches of every stage, all replicas together, never more than at the stage before."""
    each = [range(-(-microbatches // count) * count, 0, -count) for count in counts]
    for caps in itertools.product(*each):
        if all(before >= min(after, microbatches) for before, after in itertools.pairwise(caps)):
            yield caps


@dataclass
class _Shape:
    """All cuts on all orders of accelerators, for stages of so many replicas each; a case is one of both."""

    chain: Chain
    hardware: Hardware
    microbatches: int
    counts: tuple[int, ...]
    orders: list[tuple[int, ...]]
    cuts: np.ndarray = field(init=False)
    """[case, stage] last layers"""
    order: np.ndarray = field(init=False)
    """[case, rank] accelerators"""

    def __post_init__(self) -> None:
        last = len(self.chain) - 1
        cuts = [(*ends, last) for ends in itertools.combinations(range(last), len(self.counts) - 1)]
        pairs = list(itertools.product(cuts, self.orders))
        self.cuts = np.array([one for one, _ in pairs]).reshape(len(pairs), len(self.counts))
        self.order = np.array([one for _, one in pairs]).reshape(len(pairs), sum(self.counts))
        costs = [stage_costs(self._candidate(case, _NO_SCHEDULE), self.hardware) for case in range(len(pairs))]
        names = ("forward", "backward", "input_gradient", "weight_gradient", "update")
        self.cost = {name: np.array([_by_rank(own, name, self.counts) for own in costs]).T for name in names}
        of_stage = np.repeat(np.arange(len(self.counts)), self.counts)
        self.cost["all_reduce"] = np.array([own.all_reduce for own in costs]).T[of_stage]
        for name in ("send_forward", "send_backward"):
            self.cost[name] = np.array([getattr(own, name) for own in costs]).reshape(len(pairs), -1).T
        cluster, ranks = self.hardware.cluster, sum(self.counts)
        rate, late = (np.zeros((len(cluster), len(cluster))) for _ in range(2))
        for one, other in itertools.permutations(range(len(cluster)), 2):
            link = cluster.link(one, other)
            rate[one, other], late[one, other] = 1 / link.bandwidth, link.latency
        ends = self.order.T
        self.rate = np.array([[rate[ends[a], ends[b]] for b in range(ranks)] for a in range(ranks)])
        self.latency = np.array([[late[ends[a], ends[b]] for b in range(ranks)] for a in range(ranks)])
        self.bound = self._bound()
        chain = self.chain
        self.overhead = max(chain.profile.table(name).step_overhead or 0.0 for name in chain.types)

    @property
    def soonest(self) -> float:
        return float(self.bound.min()) / self.chain.microbatch / self.microbatches

    def _stages(self, case: int) -> tuple[StageChoice, ...]:
        edges = np.concatenate([[0], np.cumsum(self.counts)])
        ends = self.cuts[case].tolist()
        members = self.order[case].tolist()
        return tuple(
            StageChoice(first=first, last=last, accelerators=tuple(members[a:b]))
            for first, last, (a, b) in zip(
                [0, *(end + 1 for end in ends)], ends, itertools.pairwise(edges), strict=False
            )
        )

    def is_unlike(self) -> bool:
        """Whether the replicas of a stage are of several types in some case."""
        types = np.array([item.type for item in self.hardware.cluster.accelerators])[self.order]
        edges = np.concatenate([[0], np.cumsum(self.counts)])
        return any(
            (types[:, low:high] != types[:, low : low + 1]).any() for low, high in itertools.pairwise(edges)
        )

    def _candidate(self, case: int, schedule: Schedule) -> Candidate:
        return Candidate(label="tried", chain=self.chain, stages=self._stages(case), schedule=schedule)

    def _bound(self) -> Floats:
        """[case] seconds that no order of its actions beats.

        A stage can begin when the first micro-batch has come through the stages before it, has its share of the
        work to do, and whoever stands before it then still has an input gradient to make and a step to take.
        """
        cost, found = self.cost, np.zeros(len(self.cuts))
        before, edges = np.zeros(len(self.cuts)), np.concatenate([[0], np.cumsum(self.counts)])
        for low, high in itertools.pairwise(edges):
            parts = cost["input_gradient"][low:high] + cost["weight_gradient"][low:high]
            work = cost["forward"][low:high] + np.minimum(cost["backward"][low:high], parts)
            # Replicas may take unequal numbers of micro-batches.
            shared = self.microbatches / (1 / work).sum(axis=0)
            found = np.maximum(found, before + shared + cost["update"][low:high].min(axis=0))
            before = before + cost["forward"][low:high].min(axis=0)
        return found

    def try_all(self, schedule: Schedule, best: Best) -> None:
        """Time every case that may be faster than the best under this schedule, and keep the fastest that fits."""
        whole = with_update(schedule)
        samples = self.chain.microbatch * self.microbatches
        enough = np.inf if best.evaluation is None else samples / best.rate - self.overhead
        chosen = np.flatnonzero((self.bound < enough) & self._may_fit(schedule))
        if not len(chosen):
            return
        ranks = tuple(self.order[chosen[0]].tolist())
        kinds = {
            Kind.F: "forward",
            Kind.B: "backward",
            Kind.I: "input_gradient",
            Kind.W: "weight_gradient",
            Kind.A: "all_reduce",
            Kind.U: "update",
        }
        times = many_times(
            whole,
            network_of(self.hardware.cluster, ranks, whole),
            ManyCosts(
                seconds={int(kind): self.cost[name][:, chosen] for kind, name in kinds.items()},
                send_forward=self.cost["send_forward"][:, chosen],
                send_backward=self.cost["send_backward"][:, chosen],
                answered=np.ones((len(self.counts) - 1, len(chosen)), dtype=bool),
                rate=self.rate[:, :, chosen],
                latency=self.latency[:, :, chosen],
                by_rank=True,
            ),
        )
        assert times is not None, "every link has one sending lane here"
        best.simulated += len(chosen)
        for place in np.argsort(times, kind="stable"):
            if times[place] >= enough:
                break
            best.weighed += 1
            found = evaluate(self._candidate(int(chosen[place]), schedule), self.hardware)
            if found.short is None:
                # Of data parallelism, what the all-reduce hides goes by the replica that ends last.
                assert len(self.counts) == 1 or abs(found.timeline.time / times[place] - 1) < 1e-9
                if found.throughput > best.rate:
                    best.evaluation = found
                break

    def _may_fit(self, schedule: Schedule) -> np.ndarray:
        """[case] whether weights and in-flight activations alone leave room on every stage."""
        parted, hardware = schedule.parted_stages(), self.hardware
        fits = np.ones(len(self.cuts), bool)
        memory = np.array([hardware.cluster.type_of(index).memory for index in range(len(hardware.cluster))])
        begins, edges = np.zeros(len(self.cuts), np.int64), np.concatenate([[0], np.cumsum(self.counts)])
        for stage, (low, high) in enumerate(itertools.pairwise(edges)):
            ends = self.cuts[:, stage]
            lanes = [lane for lane in schedule.lanes if lane.rank in schedule.placement[stage]]
            held = max(_most_held(lane.kinds.tolist()) for lane in lanes)
            weights, saved = _run_bytes(self.chain, stage in parted)
            copies = hardware.static_copies() - (1 if self.chain.phases_known else 0)
            need = copies * weights[begins, ends] + held * saved[begins, ends]
            fits &= need <= memory[self.order[:, low:high]].min(axis=1) * (1 + 1e-12)
            begins = ends + 1
        return fits


def _by_rank(costs: Costs, name: str, counts: tuple[int, ...]) -> list[float]:
    """What each rank takes."""
    found: list[float] = []
    for stage, count in enumerate(counts):
        own = costs.replicas[stage] if costs.replicas is not None else ()
        found += [getattr(item, name) for item in own] or [getattr(costs, name)[stage]] * count
    return found


def _most_held(kinds: list[int]) -> int:
    """Most micro-batches between their forward and their backward, or input gradient, in a lane."""
    held = most = 0
    for kind in kinds:
        held += (kind == Kind.F) - (kind in (Kind.B, Kind.I))
        most = max(most, held)
    return most


@functools.lru_cache(maxsize=32)
def _run_bytes(chain: Chain, parted: bool) -> tuple[Floats, Floats]:
    """[first, last] weights, and what one in-flight micro-batch keeps."""
    units = len(chain)
    weights, saved = np.zeros((units, units)), np.zeros((units, units))
    for first in range(units):
        for last in range(first, units):
            found = stage_bytes(chain, first, last, parted=parted)
            weights[first, last], saved[first, last] = found.weights, found.saved_activations
    return weights, saved


_NO_SCHEDULE = capped(1, 1, [1])
