"""Many plans of one shape: every case is a choice of cuts and of accelerators, all timed at once.

A shape says how many replicas each stage has. Its cases run the same schedule and differ in costs and links alone,
so that `many_times` times them together, by the arithmetic of the simulator.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from bapipe.costs.segments import Chain, Floats
from bapipe.planner.candidate import Candidate, Hardware, StageChoice
from bapipe.planner.candidate_costs import DDP_BUCKET
from bapipe.planner.gradient_rings import gradient_sum, gradient_sum_time
from bapipe.planner.plan_network import network_of
from bapipe.planner.planned_order import PlannedOrder
from bapipe.planner.stage_tables import StageTables
from bapipe.schedule.actions import Kind
from bapipe.schedule.generators import with_recompute, with_update
from bapipe.simulator.scenario_times import ManyCosts, many_times

__all__ = ["PlanCases"]

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
_FIGURES = ("forward", "backward", "input_gradient", "weight_gradient", "update")


@dataclass(eq=False)
class PlanCases:
    """Cases of one shape at one micro-batch size."""

    tables: StageTables
    hardware: Hardware
    microbatches: int
    counts: tuple[int, ...]
    """replicas of each stage"""
    cuts: Ints
    """[case, stage] last unit of each stage"""
    orders: Ints
    """[case, rank] accelerator of each rank"""
    _seconds: dict[str, Floats] = field(init=False)
    """by figure, [stage, case], on the slowest replica"""
    _by_rank: dict[str, Floats] = field(init=False)
    """by figure, [rank, case]; empty where the replicas of every stage are of one type"""

    def __post_init__(self) -> None:
        self._edges = list(itertools.pairwise(np.cumsum([0, *self.counts]).tolist()))
        self.unlike = [False] * len(self.counts)
        """by stage, whether its replicas are of several types in some case"""
        self._firsts = np.concatenate([np.zeros((len(self.cuts), 1), np.int64), self.cuts[:, :-1] + 1], axis=1)
        self._look_up()

    def __len__(self) -> int:
        return len(self.cuts)

    @property
    def chain(self) -> Chain:
        return self.tables.chain

    def of(self, chosen: Ints) -> PlanCases:
        """Only these cases."""
        return PlanCases(
            tables=self.tables,
            hardware=self.hardware,
            microbatches=self.microbatches,
            counts=self.counts,
            cuts=self.cuts[chosen],
            orders=self.orders[chosen],
        )

    def stages(self, case: int, recompute: Sequence[int] = ()) -> tuple[StageChoice, ...]:
        """The stages of one case."""
        firsts, lasts = self._firsts[case].tolist(), self.cuts[case].tolist()
        members = self.orders[case].tolist()
        return tuple(
            StageChoice(
                first=first, last=last, accelerators=tuple(members[low:high]), recompute=index in recompute
            )
            for index, (first, last, (low, high)) in enumerate(zip(firsts, lasts, self._edges, strict=True))
        )

    def _look_up(self) -> None:
        """Fill in what every stage of every case takes."""
        cluster, chain = self.hardware.cluster, self.chain
        patterns, which = np.unique(self.orders, axis=0, return_inverse=True)
        which = which.reshape(-1)
        rows = [chain.row(item.type) for item in cluster.accelerators]
        names = _FIGURES
        self._by_rank = self._each_rank(rows) if len(chain.types) > 1 and max(self.counts) > 1 else {}
        found = {name: np.zeros((len(self.counts), len(self))) for name in (*names, "all_reduce")}
        gradients = self.tables.bytes(parted=False).trained
        for number, pattern in enumerate(patterns.tolist()):
            own = np.flatnonzero(which == number)
            for stage, (low, high) in enumerate(self._edges):
                members = tuple(pattern[low:high])
                first, last = self._firsts[own, stage], self.cuts[own, stage]
                seconds = self.tables.seconds(frozenset(rows[index] for index in members))
                for name in names:
                    found[name][stage, own] = getattr(seconds, name)[first, last]
                if len(members) > 1:
                    size = gradients[first, last]
                    late, each = gradient_sum(cluster, members).line()
                    found["all_reduce"][stage, own] = np.where(size > 0, late + size * each, 0.0)
        if len(self.counts) == 1 and self.counts[0] > 1 and self.hardware.overlap_all_reduce:
            self._overlap(found, patterns, which, gradients)
        found["recompute"] = found["forward"]
        cuts = self.cuts[:, :-1].T
        found["send_forward"], found["send_backward"] = chain.boundary_forward[cuts], chain.boundary_backward[cuts]
        self._answered = chain.answered[cuts]
        """[boundary, case] whether a gradient comes back"""
        self._seconds = found
        self._rate, self._latency = self._links()

    def _each_rank(self, rows: Sequence[int]) -> dict[str, Floats]:
        """What every rank of every case takes; empty where the replicas of every stage are of one type."""
        types = np.array(rows)[self.orders]
        self.unlike = [bool((types[:, low:high] != types[:, low : low + 1]).any()) for low, high in self._edges]
        if not any(self.unlike):
            return {}
        found = {name: np.zeros((self.orders.shape[1], len(self))) for name in _FIGURES}
        for stage, (low, high) in enumerate(self._edges):
            first, last = self._firsts[:, stage], self.cuts[:, stage]
            for rank, row in itertools.product(range(low, high), set(rows)):
                own = np.flatnonzero(types[:, rank] == row)
                seconds = self.tables.seconds(frozenset((row,)))
                for name in _FIGURES:
                    found[name][rank, own] = getattr(seconds, name)[first[own], last[own]]
        return found

    def _reduces(self, order: PlannedOrder) -> Floats:
        """[stage, case] seconds of the all-reduce under this order: of data parallelism, what the last backward of
        the replica that ends last does not hide."""
        known = self._seconds["all_reduce"]
        overlaps = len(self.counts) == 1 and self.counts[0] > 1 and self.hardware.overlap_all_reduce
        if not self._by_rank or not overlaps:
            return known
        work = self._by_rank["forward"] + self._by_rank["backward"]
        last = (np.array(order.taken(0))[:, None] * work).argmax(axis=0)
        backward = np.take_along_axis(self._by_rank["backward"], last[None], axis=0)[0]
        hidden = self.hardware.cluster.collective_overlap * backward
        return np.asarray(np.maximum(self._bucket, self._whole_reduce - hidden)[None], dtype=np.float64)

    def work_by_rank(self, *, recompute: Sequence[int] = ()) -> Floats:
        """[rank, case] seconds of a micro-batch on every rank; only where replicas are unlike."""
        work = self._by_rank["forward"] + self._by_rank["backward"]
        for stage in recompute:
            low, high = self._edges[stage]
            work[low:high] += self._by_rank["forward"][low:high]
        return work

    def _overlap(self, found: dict[str, Floats], patterns: Ints, which: Ints, gradients: Floats) -> None:
        """Of data parallelism, the all-reduce that its last backward does not hide."""
        cluster, size = self.hardware.cluster, gradients[self._firsts[:, 0], self.cuts[:, 0]]
        self._whole_reduce, self._bucket = np.zeros(len(self)), np.zeros(len(self))
        for number, pattern in enumerate(patterns.tolist()):
            own = np.flatnonzero(which == number)
            bucket = gradient_sum_time(cluster, tuple(pattern), min(DDP_BUCKET, float(size[own[0]])))
            self._whole_reduce[own], self._bucket[own] = found["all_reduce"][0, own], bucket
            hidden = cluster.collective_overlap * found["backward"][0, own]
            found["all_reduce"][0, own] = np.maximum(bucket, found["all_reduce"][0, own] - hidden)

    def _links(self) -> tuple[Floats, Floats]:
        """[from rank, to rank, case] seconds per byte, and of latency, of ranks whose stages are neighbours."""
        ranks, (rate, late) = self.orders.shape[1], self.hardware.cluster.link_figures
        found = np.zeros((2, ranks, ranks, len(self)))
        for (low, middle), (_, high) in itertools.pairwise(self._edges):
            for one, other in itertools.product(range(low, middle), range(middle, high)):
                for ends in ((one, other), (other, one)):
                    pair = self.orders[:, ends[0]], self.orders[:, ends[1]]
                    found[0][ends], found[1][ends] = rate[pair], late[pair]
        return found[0], found[1]

    @functools.cached_property
    def _sends(self) -> tuple[Floats, Floats]:
        """[boundary, case] seconds of a transfer ahead and back, over the fastest of its links."""
        ahead, back = (np.zeros((len(self.counts) - 1, len(self))) for _ in range(2))
        for boundary, ((low, middle), (_, high)) in enumerate(itertools.pairwise(self._edges)):
            rate = self._rate[low:middle, middle:high].min(axis=(0, 1))
            late = self._latency[low:middle, middle:high].min(axis=(0, 1))
            ahead[boundary] = self._seconds["send_forward"][boundary] * rate + late
            back[boundary] = np.where(
                self._answered[boundary], self._seconds["send_backward"][boundary] * rate + late, 0.0
            )
        return ahead, back

    def bound(self, order: PlannedOrder, *, best_dealt: bool = False) -> Floats:
        """[case] seconds that this order cannot beat. Cost: O(stages · cases).

        A stage begins when a micro-batch has come through those before it, and has its share of the work to do.
        With K in flight, every K-th micro-batch starts after a round trip through the stages behind. What is last
        there goes back through all the stages before it, each of which then takes its optimizer step. Where no
        gradient comes back, a stage waits for none behind it. With `best_dealt` under any dealing and with as many
        in flight as it needs. A stage may recompute while it waits for a gradient, so that this is work and on no
        way back.
        """
        own, count = self._least, len(self.counts)
        ahead, back = self._sends
        answer = own["input_gradient"] if order.parted else own["backward"]
        later = own["weight_gradient"] if order.parted else np.zeros_like(answer)
        step = self._reduces(order) + own["update"] if not best_dealt else own["update"]
        trip = np.zeros((count, len(self)))
        for stage in range(count - 1, -1, -1):
            trip[stage] = own["forward"][stage] + answer[stage]
            if stage + 1 < count:
                behind = ahead[stage] + back[stage] + trip[stage + 1]
                trip[stage] += np.where(self._answered[stage], behind, 0.0)
        found = begin = np.zeros(len(self))
        tail = later[0] + step[0]
        for stage in range(count):
            if stage:
                begin = begin + own["forward"][stage - 1] + ahead[stage - 1]
                before = np.where(self._answered[stage - 1], back[stage - 1] + answer[stage - 1] + tail, 0.0)
                tail = np.maximum(later[stage] + step[stage], before)
            for rounds, turns, work, rest in self._loads(order, stage, answer, later, best_dealt=best_dealt):
                found = np.maximum(found, begin + np.maximum(rounds * work, turns * trip[stage]) + tail)
                found = np.maximum(found, begin + rounds * (work + rest) + step[stage])
        return found

    def _loads(
        self, order: PlannedOrder, stage: int, answer: Floats, later: Floats, *, best_dealt: bool
    ) -> Iterator[tuple[float, int, Floats, Floats]]:
        """Of replicas of a stage: micro-batches, round trips, and [case] seconds of one and of what can wait."""
        if not self._by_rank or not self.unlike[stage]:
            rounds = max(order.taken(stage))
            turns = 0 if best_dealt else (rounds - 1) // order.inflight[stage] + 1
            passes = 2 if stage in order.recompute else 1
            yield rounds, turns, passes * self._seconds["forward"][stage] + answer[stage], later[stage]
            return
        low, high = self._edges[stage]
        each, again = self._by_rank, stage in order.recompute
        work = each["forward"][low:high] + each["input_gradient" if order.parted else "backward"][low:high]
        work = work + again * each["forward"][low:high]
        rest = each["weight_gradient"][low:high] if order.parted else np.zeros_like(work)
        if best_dealt:
            # As if micro-batches could be divided: what all replicas do in the time of the whole.
            none = np.zeros(len(self))
            yield self.microbatches, 0, 1 / (1 / work).sum(axis=0), none
            yield self.microbatches, 0, none, 1 / (1 / (work + rest)).sum(axis=0)
            return
        for replica, (taken, inflight) in enumerate(
            zip(order.taken(stage), order.inflight_of(stage), strict=True)
        ):
            yield taken, (taken - 1) // inflight + 1, work[replica], rest[replica]

    @functools.cached_property
    def _least(self) -> dict[str, Floats]:
        """By figure, [stage, case], on the fastest replica."""
        if not self._by_rank:
            return self._seconds
        lows = [low for low, _ in self._edges]
        return self._seconds | {
            name: np.minimum.reduceat(values, lows, axis=0) for name, values in self._by_rank.items()
        }

    def may_fit(self, order: PlannedOrder) -> Bools:
        """[case] False where some stage certainly exceeds its memory; what goes by the timeline is left out."""
        hardware, cluster = self.hardware, self.hardware.cluster
        memory = np.array([cluster.type_of(index).memory for index in range(len(cluster))])
        held, copies, counts = self.tables.bytes(parted=order.parted), hardware.static_copies(), self.counts
        fits = np.ones(len(self), np.bool_)
        for (stage, (low, high)), (part, most, rounds) in (
            (edge, own) for edge in enumerate(self._edges) for own in self._held(order, edge[0])
        ):
            own = self._firsts[:, stage], self.cuts[:, stage]
            again = stage in order.recompute
            after = (
                counts[stage + 1] // math.gcd(counts[stage], counts[stage + 1]) if stage + 1 < len(counts) else 0
            )
            before = counts[stage - 1] // math.gcd(counts[stage], counts[stage - 1]) if stage else 0
            if order.dealing is not None:  # at least one wire each way
                after, before = min(1, after), min(1, before)
            trained = held.trained[own]
            frozen = held.weights[own] - trained
            sending = 2 * (after * held.sent[own] + before * held.answered[own])
            each = held.kept[own] if again else held.saved_activations[own]
            if self.chain.phases_known:
                forward = (copies - 1) * trained + frozen + most * each + held.casts[own] + sending
                need = np.maximum(
                    forward + (0.0 if again else held.forward_workspace[own]),
                    hardware.update_copies() * trained + frozen + sending,
                )
                if rounds > most and not order.parted and not again:
                    need = np.maximum(need, forward + trained + held.backward_workspace[own])
            else:
                receiving = 2 * (after * held.returned[own] + before * held.received[own])
                need = copies * trained + frozen + most * each + held.casts[own] + sending + receiving
                need = need + held.workspace[own]
            room = memory[self.orders[:, low:high][:, part]].min(axis=1)
            fits &= need <= room * (1 + 1e-12)
        return fits

    def _held(self, order: PlannedOrder, stage: int) -> Iterator[tuple[slice, int, int]]:
        """Of replicas of a stage: which, micro-batches that each holds, and that it takes."""
        if order.dealing is None:
            rounds = -(-self.microbatches // self.counts[stage])
            yield slice(None), min(order.inflight[stage], rounds), rounds
            return
        for replica, both in enumerate(zip(order.inflight_of(stage), order.taken(stage), strict=True)):
            yield slice(replica, replica + 1), min(both), both[1]

    def times(self, order: PlannedOrder, cases: Ints) -> Floats | None:
        """Seconds of some cases in this order; None where links are shared, so that each is simulated alone."""
        if self.hardware.cluster.shares_links:
            return None
        schedule = with_update(
            with_recompute(order.schedule, order.recompute) if order.recompute else order.schedule
        )
        reduces = self._reduces(order)
        seconds = self._seconds | {"all_reduce": reduces}
        if self._by_rank:
            stages = np.repeat(np.arange(len(self.counts)), self.counts)
            seconds |= self._by_rank | {"all_reduce": reduces[stages], "recompute": self._by_rank["forward"]}
        own = {name: values[:, cases] for name, values in seconds.items()}
        network = network_of(self.hardware.cluster, tuple(self.orders[cases[0]].tolist()), schedule)
        return many_times(
            schedule,
            network,
            ManyCosts(
                seconds={
                    int(Kind.F): own["forward"],
                    int(Kind.B): own["backward"],
                    int(Kind.I): own["input_gradient"],
                    int(Kind.W): own["weight_gradient"],
                    int(Kind.R): own["recompute"],
                    int(Kind.A): own["all_reduce"],
                    int(Kind.U): own["update"],
                },
                send_forward=own["send_forward"],
                send_backward=own["send_backward"],
                answered=self._answered[:, cases],
                rate=self._rate[:, :, cases],
                latency=self._latency[:, :, cases],
                by_rank=bool(self._by_rank),
            ),
        )

    def candidate(self, case: int, order: PlannedOrder, label: str) -> Candidate:
        """One case in this order."""
        stages = self.stages(case, order.recompute)
        return Candidate(label=label, chain=self.chain, stages=stages, schedule=order.schedule)
