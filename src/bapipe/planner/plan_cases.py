"""Many plans of one shape: every case is a choice of cuts and of accelerators, all timed at once.

A shape says how many replicas each stage has. Its cases run the same schedule and differ in costs and links alone,
so that `many_times` times them together, by the arithmetic of the simulator.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from bapipe.costs.segments import Chain, Floats
from bapipe.planner.evaluate import DDP_BUCKET, Candidate, Hardware, StageChoice, all_reduce_time, network_of
from bapipe.planner.planned_order import PlannedOrder
from bapipe.planner.stage_tables import StageTables
from bapipe.schedule.actions import Kind
from bapipe.schedule.generators import with_recompute, with_update
from bapipe.simulator.scenario_times import ManyCosts, many_times

__all__ = ["PlanCases"]

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
_MANY_BYTES = 1e12
"""so many that an all-reduce's latency is lost in its time, from which the time of one byte is taken"""


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
    """by figure, [stage, case]"""

    def __post_init__(self) -> None:
        self._edges = list(itertools.pairwise(np.cumsum([0, *self.counts]).tolist()))
        self._firsts = np.concatenate([np.zeros((len(self.cuts), 1), np.int64), self.cuts[:, :-1] + 1], axis=1)
        self._look_up()

    def __len__(self) -> int:
        return len(self.cuts)

    @property
    def chain(self) -> Chain:
        return self.tables.chain

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
        names = ("forward", "backward", "input_gradient", "weight_gradient", "update")
        found = {name: np.zeros((len(self.counts), len(self))) for name in (*names, "all_reduce")}
        weights = self.tables.bytes(parted=False).weights
        for number, pattern in enumerate(patterns.tolist()):
            own = np.flatnonzero(which == number)
            for stage, (low, high) in enumerate(self._edges):
                members = tuple(pattern[low:high])
                first, last = self._firsts[own, stage], self.cuts[own, stage]
                seconds = self.tables.seconds(frozenset(rows[index] for index in members))
                for name in names:
                    found[name][stage, own] = getattr(seconds, name)[first, last]
                if len(members) > 1:
                    size = weights[first, last]
                    late = all_reduce_time(cluster, members, 0.0)
                    each = (all_reduce_time(cluster, members, _MANY_BYTES) - late) / _MANY_BYTES
                    found["all_reduce"][stage, own] = late + size * each
        if len(self.counts) == 1 and self.counts[0] > 1 and self.hardware.overlap_all_reduce:
            self._overlap(found, patterns, which, weights)
        found["recompute"] = found["forward"]
        cuts = self.cuts[:, :-1].T
        found["send_forward"], found["send_backward"] = chain.boundary_forward[cuts], chain.boundary_backward[cuts]
        self._seconds = found
        self._rate, self._latency = self._links()

    def _overlap(self, found: dict[str, Floats], patterns: Ints, which: Ints, weights: Floats) -> None:
        """Of data parallelism, the all-reduce that its last backward does not hide."""
        cluster, size = self.hardware.cluster, weights[self._firsts[:, 0], self.cuts[:, 0]]
        for number, pattern in enumerate(patterns.tolist()):
            own = np.flatnonzero(which == number)
            bucket = all_reduce_time(cluster, tuple(pattern), min(DDP_BUCKET, float(size[own[0]])))
            hidden = cluster.collective_overlap * found["backward"][0, own]
            found["all_reduce"][0, own] = np.maximum(bucket, found["all_reduce"][0, own] - hidden)

    def _links(self) -> tuple[Floats, Floats]:
        """[from rank, to rank, case] seconds per byte, and of latency, of ranks whose stages are neighbours."""
        cluster, ranks = self.hardware.cluster, self.orders.shape[1]
        rate, late = (np.zeros((len(cluster), len(cluster))) for _ in range(2))
        for one, other in itertools.permutations(range(len(cluster)), 2):
            if cluster.connected(one, other):
                link = cluster.link(one, other)
                rate[one, other], late[one, other] = 1 / link.bandwidth, link.latency
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
            back[boundary] = self._seconds["send_backward"][boundary] * rate + late
        return ahead, back

    def bound(self, order: PlannedOrder) -> Floats:
        """[case] seconds that this order cannot beat. Cost: O(stages · cases).

        A stage begins when a micro-batch has come through those before it, and has its share of the work to do.
        With K in flight, every K-th micro-batch starts after a round trip through the stages behind. What is last
        there goes back through all the stages before it, each of which then takes its optimizer step. A stage may
        recompute while it waits for an error, so that this is work and on no way back.
        """
        own, count = self._seconds, len(self.counts)
        ahead, back = self._sends
        again = np.zeros((count, 1))
        again[list(order.recompute)] = 1.0
        answer = own["input_gradient"] if order.parted else own["backward"]
        again = again * own["forward"]
        later = own["weight_gradient"] if order.parted else np.zeros_like(answer)
        step = own["all_reduce"] + own["update"]
        trip = np.zeros((count, len(self)))
        for stage in range(count - 1, -1, -1):
            trip[stage] = own["forward"][stage] + answer[stage]
            if stage + 1 < count:
                trip[stage] += ahead[stage] + back[stage] + trip[stage + 1]
        found = begin = np.zeros(len(self))
        tail = later[0] + step[0]
        for stage in range(count):
            if stage:
                begin = begin + own["forward"][stage - 1] + ahead[stage - 1]
                tail = np.maximum(later[stage] + step[stage], back[stage - 1] + answer[stage - 1] + tail)
            rounds = -(-self.microbatches // self.counts[stage])
            turns = (rounds - 1) // order.inflight[stage] + 1
            work = own["forward"][stage] + again[stage] + answer[stage]
            found = np.maximum(found, begin + np.maximum(rounds * work, turns * trip[stage]) + tail)
            found = np.maximum(found, begin + rounds * (work + later[stage]) + step[stage])
        return found

    def may_fit(self, order: PlannedOrder) -> Bools:
        """[case] False where some stage certainly exceeds its memory; what goes by the timeline is left out."""
        hardware, cluster = self.hardware, self.hardware.cluster
        memory = np.array([cluster.type_of(index).memory for index in range(len(cluster))])
        held, copies, counts = self.tables.bytes(parted=order.parted), hardware.static_copies(), self.counts
        fits = np.ones(len(self), np.bool_)
        for stage, (low, high) in enumerate(self._edges):
            own = self._firsts[:, stage], self.cuts[:, stage]
            rounds = -(-self.microbatches // counts[stage])
            again, most = stage in order.recompute, min(order.inflight[stage], rounds)
            after = (
                counts[stage + 1] // math.gcd(counts[stage], counts[stage + 1]) if stage + 1 < len(counts) else 0
            )
            before = counts[stage - 1] // math.gcd(counts[stage], counts[stage - 1]) if stage else 0
            weights = held.weights[own]
            sending = 2 * (after * held.sent[own] + before * held.answered[own])
            each = held.kept[own] if again else held.saved_activations[own]
            if self.chain.phases_known:
                forward = (copies - 1) * weights + most * each + held.casts[own] + sending
                need = np.maximum(
                    forward + (0.0 if again else held.forward_workspace[own]),
                    hardware.update_copies() * weights + sending,
                )
                if rounds > most and not order.parted and not again:
                    need = np.maximum(need, forward + weights + held.backward_workspace[own])
            else:
                receiving = 2 * (after * held.returned[own] + before * held.received[own])
                need = copies * weights + most * each + held.casts[own] + sending + receiving
                need = need + held.workspace[own]
            fits &= need <= memory[self.orders[:, low:high]].min(axis=1) * (1 + 1e-12)
        return fits

    def times(self, order: PlannedOrder, cases: Ints) -> Floats | None:
        """Seconds of some cases in this order; None where links are shared, so that each is simulated alone."""
        if self.hardware.cluster.shares_links:
            return None
        schedule = with_update(
            with_recompute(order.schedule, order.recompute) if order.recompute else order.schedule
        )
        own = {name: values[:, cases] for name, values in self._seconds.items()}
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
                rate=self._rate[:, :, cases],
                latency=self._latency[:, :, cases],
            ),
        )

    def candidate(self, case: int, order: PlannedOrder, label: str) -> Candidate:
        """One case in this order."""
        stages = self.stages(case, order.recompute)
        return Candidate(label=label, chain=self.chain, stages=stages, schedule=order.schedule)
