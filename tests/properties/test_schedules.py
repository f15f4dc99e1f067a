"""What holds for every schedule: formulas exact in their range, right orders, bounds, one answer per engine."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bapipe.errors import DeadlockError
from bapipe.schedule.actions import Schedule
from bapipe.schedule.closed_forms import closed_form, unified_time
from bapipe.schedule.generators import (
    SCHEDULES,
    capped,
    interleaved,
    make_schedule,
    with_recompute,
    with_update,
    zb_h1,
    zb_h2,
)
from bapipe.schedule.inflight import full_overlap_caps
from bapipe.schedule.v_shape import V_SHAPED
from bapipe.schedule.validate import check
from bapipe.simulator.action_costs import Costs
from bapipe.simulator.engine import TaskTimes, numba_available, time_tasks
from bapipe.simulator.lowering import Network, Route, lower
from bapipe.simulator.simulate import simulate
from bapipe.simulator.steady_period import steady_period
from bapipe.simulator.timeline import Timeline
from example_counts import examples

STAGES, MICROBATCHES = st.integers(1, 7), st.integers(1, 24)
TIME, TRANSFER = st.integers(1, 40), st.integers(0, 40)


@st.composite
def unequal_costs(draw: st.DrawFn, num_stages: int) -> Costs:
    """Costs with every stage and every transfer of its own, in whole numbers, so that sums are exact."""

    def several(values: st.SearchStrategy[int], count: int) -> list[int]:
        return draw(st.lists(values, min_size=count, max_size=count))

    return Costs.of(
        num_stages,
        forward=several(TIME, num_stages),
        backward=several(TIME, num_stages),
        transfer=several(TRANSFER, num_stages - 1),
        transfer_backward=several(TRANSFER, num_stages - 1),
    )


@st.composite
def falling_caps(draw: st.DrawFn, num_stages: int) -> list[int]:
    """Caps that never grow along the pipeline, so that no order of theirs deadlocks."""
    steps = draw(st.lists(st.integers(0, 3), min_size=num_stages - 1, max_size=num_stages - 1))
    last = draw(st.integers(1, 3))
    return [last + sum(steps[i:]) for i in range(num_stages)]


UNBLOCKED = ("interleaved", "fbp-as", "pipedream", *V_SHAPED)
"""schedules that blocking sends cannot run"""


def costs_of_stages(name: str, costs: Costs) -> Costs:
    """Costs of the ranks as those of their stages."""
    return costs.folded() if name in V_SHAPED else costs.split(2) if name == "interleaved" else costs


@st.composite
def capped_cases(draw: st.DrawFn) -> tuple[list[int], Costs, int]:
    num_stages = draw(st.integers(1, 6))
    return draw(falling_caps(num_stages)), draw(unequal_costs(num_stages)), draw(st.integers(1, 40))


class TestClosedForms:
    @settings(max_examples=examples(400))
    @given(
        N=STAGES,
        M=st.integers(1, 40),
        F=TIME,
        B=TIME,
        share=st.floats(0, 1),
        d=st.integers(1, 4),
        k=st.integers(1, 5),
    )
    def test_unified(self, N: int, M: int, F: int, B: int, share: float, d: int, k: int) -> None:
        SR = math.floor(share * (F + B if k == 1 and d <= 3 else min(F, B)))
        schedule = capped(N, M, [k + d * (N - i) for i in range(1, N + 1)])
        costs = Costs.of(N, forward=F, backward=B, transfer=SR)
        assert simulate(schedule, costs).time == unified_time(N, M, F, B, SR, d=d, k=k)
        form = closed_form(schedule, costs)
        assert form is not None
        assert form.valid

    @pytest.mark.parametrize(("d", "time"), [(3, 22), (4, 24), (5, 24)])
    def test_many_forwards_ahead_queue_up_on_slow_links(self, d: int, time: int) -> None:
        """N = 3, M = 5: the formula has 22 for each, and says where it does not hold."""
        schedule, costs = capped(3, 5, [1 + 2 * d, 1 + d, 1]), Costs.of(3, forward=1, backward=1, transfer=2)
        form = closed_form(schedule, costs)
        assert form is not None
        assert (simulate(schedule, costs).time, form.time, form.valid) == (time, 22, d == 3)

    @given(N=STAGES, M=st.integers(1, 40), F=TIME, B=TIME, SR=TRANSFER)
    def test_whatever_says_that_it_holds_does(self, N: int, M: int, F: int, B: int, SR: int) -> None:
        costs = Costs.of(N, forward=F, backward=B, transfer=SR)
        for name in SCHEDULES:
            schedule = make_schedule(name, N, M)
            stage_costs = costs_of_stages(name, costs)
            form = closed_form(schedule, stage_costs)
            if form is not None and form.valid:
                assert simulate(schedule, stage_costs).time == pytest.approx(form.time, rel=1e-12), name

    @given(N=STAGES, groups=st.integers(1, 5), v=st.integers(1, 4), F=TIME, B=TIME)
    def test_interleaved(self, N: int, groups: int, v: int, F: int, B: int) -> None:
        """Bubble (N−1)P/v for M a multiple of N, without transfers."""
        M, P = groups * N, (F + B) * v  # whole numbers after the split
        costs = Costs.of(N, forward=F * v, backward=B * v).split(v)
        timeline = simulate(interleaved(N, M, virtual=v), costs)
        assert timeline.time == M * P + (N - 1) * P / v

    @given(N=STAGES, more=st.integers(0, 20), F=TIME, I=TIME, W=TIME)
    def test_zb_h1(self, N: int, more: int, F: int, I: int, W: int) -> None:  # noqa: E741
        """Bubble (N−1)(F+I−W) while W ≤ F and W ≤ I."""
        F, I = max(F, W), max(I, W)  # noqa: E741
        M = N + more
        costs = Costs.of(N, forward=F, backward=I + W, weight_gradient=W)
        timeline = simulate(zb_h1(N, M), costs)
        assert timeline.time == M * (F + I + W) + (N - 1) * (F + I - W)
        assert timeline.peak_in_flight() == [min(M, N)] * N

    @given(N=STAGES, more=st.integers(0, 20), F=TIME, I=TIME, W=TIME)
    def test_zb_h2(self, N: int, more: int, F: int, I: int, W: int) -> None:  # noqa: E741
        """Bubble (N−1)(F+I−2W) within the longest span of a rank; the makespan adds the stagger of the ranks."""
        F, I = max(F, W), max(I, W)  # noqa: E741
        M = 2 * N - 1 + more
        costs = Costs.of(N, forward=F, backward=I + W, weight_gradient=W)
        timeline = simulate(zb_h2(N, M), costs)
        work = M * (F + I + W)
        assert max(timeline.spans()) == work + (N - 1) * (F + I - 2 * W)
        assert timeline.makespan == work + (N - 1) * max(F, F + I - 2 * W)
        assert timeline.peak_in_flight() == [2 * N - 1] * N


class TestOrders:
    @staticmethod
    def require_right_orders(N: int, M: int, v: int) -> None:
        for name in SCHEDULES:
            schedule = make_schedule(name, N, M, virtual=v)
            assert check(schedule) == [], name
            if name not in ("interleaved", *V_SHAPED):
                assert check(schedule, sends="rendezvous") == [], name
        assert check(make_schedule("fbp-as", N, M, slots="static")) == []

    @given(N=STAGES, M=MICROBATCHES, v=st.integers(1, 3))
    def test_every_order_is_right(self, N: int, M: int, v: int) -> None:
        self.require_right_orders(N, M, v)

    @pytest.mark.parametrize(("N", "M"), [(1, 1), (1, 5), (5, 1), (5, 2), (2, 5)])
    def test_small_cases_are_ordinary(self, N: int, M: int) -> None:
        self.require_right_orders(N, M, 2)

    @given(case=capped_cases())
    def test_capped_orders_are_right(self, case: tuple[list[int], Costs, int]) -> None:
        caps, _, M = case
        schedule = capped(len(caps), M, caps)
        assert check(schedule) == []
        assert check(with_update(with_recompute(schedule))) == []

    @given(case=capped_cases())
    def test_checker_and_simulator_agree_on_blocking(self, case: tuple[list[int], Costs, int]) -> None:
        """Not every order survives blocking sends; where the checker says that one does, it can be timed."""
        caps, costs, M = case
        schedule, blocking = capped(len(caps), M, caps), Network(sending="blocking")
        if check(schedule, sends="rendezvous"):
            with pytest.raises(DeadlockError, match=r"rank \d+ at \d+[FB]\d+"):
                simulate(schedule, costs, blocking)
        else:
            assert simulate(schedule, costs, blocking).time >= simulate(schedule, costs).time

    @given(counts=st.lists(st.integers(1, 4), min_size=1, max_size=4), M=MICROBATCHES)
    def test_replicated_orders_are_right(self, counts: list[int], M: int) -> None:
        for name in ("gpipe", "1f1b-sno", "1f1b-so"):
            schedule = make_schedule(name, len(counts), M, replicas=counts)
            assert check(schedule) == [], name
            assert check(with_update(schedule)) == [], name

    @given(case=capped_cases())
    def test_peak_is_the_cap(self, case: tuple[list[int], Costs, int]) -> None:
        caps, costs, M = case
        assert simulate(capped(len(caps), M, caps), costs).peak_in_flight() == [min(M, cap) for cap in caps]


class TestBounds:
    @given(case=capped_cases(), sending=st.sampled_from(["after-compute", "cut-through"]))
    def test_time_is_never_under_the_bounds(self, case: tuple[list[int], Costs, int], sending: str) -> None:
        caps, costs, M = case
        network = Network(sending=sending)  # type: ignore[arg-type]
        schedule = capped(len(caps), M, caps)
        time = simulate(schedule, costs, network).time
        assert time >= max(M * (f + b) for f, b in zip(costs.forward, costs.backward, strict=True))
        assert time >= (M - caps[0] + 1) * steady_period(schedule, costs, network) * (1 - 1e-12)

    @given(N=STAGES, M=MICROBATCHES, data=st.data())
    def test_no_schedule_beats_its_slowest_stage(self, N: int, M: int, data: st.DataObject) -> None:
        costs = data.draw(unequal_costs(N))
        slowest = max(M * (f + b) for f, b in zip(costs.forward, costs.backward, strict=True))
        for name in SCHEDULES:
            stage_costs = costs_of_stages(name, costs)
            timeline = simulate(make_schedule(name, N, M), stage_costs)
            assert timeline.time >= slowest * (1 - 1e-12), name
            assert -1e-12 <= timeline.bubble < 1, name

    @settings(max_examples=examples(60))
    @given(case=capped_cases(), sending=st.sampled_from(["after-compute", "cut-through"]))
    def test_steady_period_is_reached(self, case: tuple[list[int], Costs, int], sending: str) -> None:
        """420 is a multiple of every turn count that these caps can give up to 7, so whole cycles are compared."""
        caps, costs, _ = case
        caps = [min(cap, caps[-1] + 6) for cap in caps]
        network = Network(sending=sending)  # type: ignore[arg-type]
        early, late = (capped(len(caps), M, caps) for M in (150, 150 + 420))
        measured = (simulate(late, costs, network).time - simulate(early, costs, network).time) / 420
        assert measured == pytest.approx(steady_period(early, costs, network), rel=1e-12)

    @given(case=capped_cases(), data=st.data())
    def test_larger_costs_never_help(self, case: tuple[list[int], Costs, int], data: st.DataObject) -> None:
        caps, costs, M = case
        schedule = capped(len(caps), M, caps)
        field = data.draw(st.sampled_from(["forward", "backward", "send_forward", "send_backward"]))
        values = list(getattr(costs, field))
        if values:
            values[data.draw(st.integers(0, len(values) - 1))] += data.draw(st.integers(1, 50))
        slower = dataclasses.replace(costs, **{field: tuple(values)})
        assert simulate(schedule, slower).time >= simulate(schedule, costs).time


class TestFullOverlap:
    @given(N=STAGES, M=st.integers(1, 60), F=TIME, B=TIME, SR=TRANSFER)
    def test_uniform(self, N: int, M: int, F: int, B: int, SR: int) -> None:
        caps = full_overlap_caps([F] * N, [B] * N, [SR] * (N - 1), [SR] * (N - 1))
        assert caps == tuple(1 + (N - i) * (1 + math.ceil(2 * SR / (F + B))) for i in range(1, N + 1))
        if SR <= F + B:
            costs = Costs.of(N, forward=F, backward=B, transfer=SR)
            full = (M + N - 1) * (F + B) + 2 * (N - 1) * SR
            assert simulate(capped(N, M, caps), costs).time == full
            more = [cap + 3 * (N - i) for i, cap in enumerate(caps, 1)]
            assert simulate(capped(N, M, more), costs).time >= full

    @given(data=st.data(), N=STAGES)
    def test_no_transfer_delays_the_steady_state(self, data: st.DataObject, N: int) -> None:
        costs = data.draw(unequal_costs(N))
        caps = full_overlap_caps(costs.forward, costs.backward, costs.send_forward, costs.send_backward)
        work = max(f + b for f, b in zip(costs.forward, costs.backward, strict=True))
        assert steady_period(capped(N, 4, caps), costs) == max(work, costs.transfer)

    @given(data=st.data(), N=st.integers(2, 6))
    def test_one_less_is_too_few_at_every_stage(self, data: st.DataObject, N: int) -> None:
        costs = data.draw(unequal_costs(N))
        caps = full_overlap_caps(costs.forward, costs.backward, costs.send_forward, costs.send_backward)
        work = max(f + b for f, b in zip(costs.forward, costs.backward, strict=True))
        for stage in range(N - 1):
            fewer = list(caps)
            fewer[stage] -= 1
            # The order deadlocks if the next stage then wants more micro-batches than this one may hold.
            if fewer[stage] >= max(fewer[stage + 1 :]):
                assert steady_period(capped(N, 4, fewer), costs) > work


def same(first: Timeline, second: Timeline) -> bool:
    """Bit for bit."""
    return (
        np.array_equal(first.start, second.start)
        and np.array_equal(first.end, second.end)
        and np.array_equal(first.transfers.start, second.transfers.start)
        and np.array_equal(first.transfers.arrival, second.transfers.arrival)
    )


def kinds_of_schedules(N: int, M: int, replicas: list[int]) -> list[tuple[Schedule, bool]]:
    """Schedules of every sort, each with whether it may run with blocking sends."""
    made = [(make_schedule(name, N, M), name not in UNBLOCKED) for name in SCHEDULES]
    made.append((make_schedule("fbp-as", N, M, slots="static"), False))
    made.append((with_update(make_schedule("1f1b-so", N, M, replicas=replicas)), False))
    made.append((with_update(with_recompute(make_schedule("zb-h1", N, M))), True))
    return made


@pytest.mark.skipif(not numba_available(), reason="numba is not installed")
class TestEngines:
    @settings(max_examples=examples(40))
    @given(N=st.integers(1, 5), M=st.integers(1, 12), data=st.data())
    def test_numba_and_python_agree_bit_for_bit(self, N: int, M: int, data: st.DataObject) -> None:
        share = data.draw(st.floats(0.1, 3))  # so that sums round
        costs = data.draw(unequal_costs(N))
        costs = dataclasses.replace(costs, forward=tuple(value * share for value in costs.forward))
        replicas = data.draw(st.lists(st.integers(1, 3), min_size=N, max_size=N))
        networks = [
            Network(),
            Network(duplex="half"),
            Network(duplex="shared"),
            Network(latency_only=True),
            Network(sending="cut-through", duplex="half"),
            Network(sending="blocking"),
        ]
        for schedule, blocks in kinds_of_schedules(N, M, replicas):
            own = costs_of_stages(schedule.name, costs)
            for network in networks:
                if network.sending != "blocking" or blocks:
                    fast = simulate(schedule, own, network, engine="numba")
                    assert same(fast, simulate(schedule, own, network, engine="python")), (schedule.name, network)


class TestDisciplines:
    @settings(max_examples=examples(60))
    @given(N=st.integers(1, 5), M=st.integers(1, 12), data=st.data())
    def test_order_of_claims_is_moot_without_contention(self, N: int, M: int, data: st.DataObject) -> None:
        """Where every link has one sending lane, running ahead gives what strict order of time gives."""
        costs = data.draw(unequal_costs(N))
        replicas = data.draw(st.lists(st.integers(1, 3), min_size=N, max_size=N))
        cut_through = data.draw(st.booleans())
        for schedule, _ in kinds_of_schedules(N, M, replicas):
            lowered = lower(schedule, Network())
            assert not lowered.graph.contended

            def timed(contended: bool, lowered=lowered) -> TaskTimes:  # type: ignore[no-untyped-def]
                generator = np.random.default_rng(N * 100 + M)
                channels = len(lowered.channels)
                return time_tasks(
                    dataclasses.replace(lowered.graph, contended=contended),
                    duration=generator.integers(1, 40, len(lowered.kinds)).astype(float),
                    occupy=generator.integers(0, 40, channels).astype(float),
                    latency=generator.integers(0, 5, channels).astype(float),
                    cut_through=cut_through,
                    engine="python",
                )

            ahead, ordered = timed(False), timed(True)
            for name in ("start", "end", "sent", "arrival"):
                assert np.array_equal(getattr(ahead, name), getattr(ordered, name), equal_nan=True), schedule.name
        assert simulate(make_schedule("gpipe", N, M), costs).time > 0

    @given(N=st.integers(2, 5), M=MICROBATCHES, data=st.data())
    def test_sharing_a_link_never_overlaps_transfers(self, N: int, M: int, data: st.DataObject) -> None:
        costs = data.draw(unequal_costs(N))
        for duplex in ("half", "shared"):
            network = Network(duplex=duplex)  # type: ignore[arg-type]
            timeline = simulate(make_schedule("1f1b-so", N, M), costs, network)
            links: dict[object, list[tuple[float, float]]] = {}
            for index, source in enumerate(timeline.transfers.source):
                ends = int(timeline.ranks[source]), int(timeline.transfers.to_rank[index])
                times = float(timeline.transfers.start[index]), float(timeline.transfers.arrival[index])
                links.setdefault(network.link(*ends), []).append(times)
            for crossings in links.values():
                crossings.sort()
                for (_, arrived), (left, _) in itertools.pairwise(crossings):
                    assert left >= arrived

    @given(N=st.integers(2, 5), M=MICROBATCHES, data=st.data())
    def test_bytes_over_bandwidth_are_seconds(self, N: int, M: int, data: st.DataObject) -> None:
        """The same transfers given in bytes, with 1/bandwidth in the routes; powers of two keep it exact."""
        costs = data.draw(unequal_costs(N))
        routes = {(a, b): Route(seconds_per_unit=0.25) for a in range(N) for b in range(N) if a != b}
        in_bytes = dataclasses.replace(
            costs,
            send_forward=tuple(4 * value for value in costs.send_forward),
            send_backward=tuple(4 * value for value in costs.send_backward),
        )
        for name in ("1f1b-sno", "fbp-as", "zb-h2", "pipedream"):
            schedule = make_schedule(name, N, M)
            expected = simulate(schedule, costs)
            got = simulate(schedule, in_bytes, Network(routes=routes))
            assert same(expected, got)
            assert expected.time == got.time
