"""V-shaped orders as published: what each rank holds, how long it idles, and torch's own orders beside them."""

from __future__ import annotations

from textwrap import dedent

import pytest

from bapipe.errors import BaPipeError
from bapipe.schedule.actions import Action, Kind, Schedule
from bapipe.schedule.generators import SCHEDULES, make_schedule
from bapipe.schedule.inflight import v_activations
from bapipe.schedule.schedule_file import from_torch_csv, to_torch_csv
from bapipe.schedule.v_shape import V_SHAPED, v_placement
from bapipe.schedule.validate import check
from bapipe.simulator.action_costs import Costs
from bapipe.simulator.simulate import simulate

SIZES = [(1, 3), (2, 4), (2, 12), (3, 9), (4, 8), (4, 24), (5, 20), (6, 30), (8, 32)]


def alike(ranks: int) -> Costs:
    """Every action of every stage takes 1."""
    return Costs.of(2 * ranks, forward=1, backward=2, weight_gradient=1)


def held(schedule: Schedule) -> list[int]:
    """Most activations of its two stages that each rank holds at once, by the order alone."""
    peaks = []
    for lane in schedule.lanes:
        now = most = 0
        for action in lane:
            now += {Kind.F: 1, Kind.B: -1, Kind.W: -1}.get(action.kind, 0)
            most = max(most, now)
        peaks.append(most)
    return peaks


def drawn(schedule: Schedule) -> str:
    return "\n".join(f"{lane.rank} " + " ".join(map(str, lane)) for lane in schedule.lanes)


def test_a_rank_holds_two_stages_that_mirror_each_other() -> None:
    assert v_placement(3) == ((0,), (1,), (2,), (2,), (1,), (0,))
    assert [make_schedule("zb-v", 3, 4).stages_of(rank) for rank in range(3)] == [(0, 5), (1, 4), (2, 3)]


def test_zb_v() -> None:
    assert drawn(make_schedule("zb-v", 2, 3)) == dedent("""\
        0 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2
        1 1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2""")


def test_v_half() -> None:
    assert drawn(make_schedule("v-half", 2, 2)) == dedent("""\
        0 0F0 0F1 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 0I1 0W1
        1 1F0 2F0 1F1 2I0 2F1 2W0 1I0 2I1 1W0 2W1 1I1 1W1""")


def test_v_min() -> None:
    assert drawn(make_schedule("v-min", 2, 2)) == dedent("""\
        0 0F0 3F0 3I0 3W0 0F1 0I0 0W0 3F1 3I1 3W1 0I1 0W1
        1 1F0 2F0 2I0 1I0 1F1 2F1 2W0 1W0 2I1 1I1 2W1 1W1""")


def test_dualpipe_v() -> None:
    assert drawn(make_schedule("dualpipe-v", 2, 4)) == dedent("""\
        0 0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 3F2 0B0 3B2 3F3 0B1 3B3 0I2 0W2 0I3 0W3
        1 1F0 2F0 1F1 2F1 1F2 2B0 2F2 1B0 1F3 2B1 2F3 1B1 2B2 1B2 2I3 1I3 2W3 1W3""")


@pytest.mark.parametrize("name", V_SHAPED)
@pytest.mark.parametrize(("ranks", "microbatches"), [*SIZES, (3, 1), (6, 2), (4, 5)])
def test_orders_are_right_on_few_messages_too(name: str, ranks: int, microbatches: int) -> None:
    schedule = make_schedule(name, ranks, microbatches)
    assert check(schedule, sends="windowed") == []
    assert max(held(schedule)) <= v_activations(name, ranks)


@pytest.mark.parametrize(("ranks", "microbatches"), [size for size in SIZES if size[1] >= 2 * size[0]])
class TestAsPublished:
    """With as many micro-batches as the publications assume, and F = I = W = 1 on each of a rank's two stages."""

    def test_memory(self, ranks: int, microbatches: int) -> None:
        """In micro-batches of a rank's whole share: 1F1B's N, ⌊(N+2)/2⌋, ⌊(N+4)/3⌋, and half a one more than N."""
        whole = {"zb-v": ranks, "v-half": (ranks + 2) // 2, "v-min": (ranks + 4) // 3, "dualpipe-v": ranks + 0.5}
        for name, wanted in whole.items():
            schedule = make_schedule(name, ranks, microbatches)
            assert max(held(schedule)) == 2 * wanted, name
            timeline = simulate(schedule, alike(ranks))
            assert max(timeline.peak_activations()) <= wanted, name
        for name in ("zb-v", "dualpipe-v"):
            assert len(set(held(make_schedule(name, ranks, microbatches)))) == 1, name

    def test_bubble(self, ranks: int, microbatches: int) -> None:
        """None in a rank's span, about 3N and 4N actions, and DualPipeV's (N−1)(F&B + B − 3W) without overlap."""
        work = 6 * microbatches
        spans = {
            name: max(simulate(make_schedule(name, ranks, microbatches), alike(ranks)).spans()) - work
            for name in V_SHAPED
        }
        assert spans["zb-v"] == 0
        assert spans["v-half"] <= 3.5 * ranks - 3.5
        assert spans["v-min"] <= 4 * ranks - 4
        assert spans["dualpipe-v"] <= (ranks - 1) * (3 + 2 - 3)
        makespan = simulate(make_schedule("zb-v", ranks, microbatches), alike(ranks)).time
        assert makespan == work + ranks - 1

    def test_torch_has_the_same_orders(self, ranks: int, microbatches: int) -> None:
        """Of ZB-V and DualPipeV; its overlapped pairs one after the other."""
        for name, own in torch_orders(ranks, microbatches).items():
            schedule = make_schedule(name, ranks, microbatches)
            assert [list(map(str, lane)) for lane in schedule.lanes] == own


def torch_orders(ranks: int, microbatches: int) -> dict[str, list[list[str]]]:
    """What torch would run on each rank, made without a process group."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    found = {}
    for name, cls in (("zb-v", schedules.ScheduleZBVZeroBubble), ("dualpipe-v", schedules.ScheduleDualPipeV)):
        made = object.__new__(cls)
        made.pp_group_size, made._n_microbatches = ranks, microbatches
        made.num_stages = made._num_stages = 2 * ranks
        rows = []
        for rank in range(ranks):
            actions = [item for item in made._calculate_single_rank_operations(rank) if item is not None]
            parts = [part for item in actions for part in (item.sub_actions or (item,))]
            rows.append(
                [
                    str(Action(part.stage_index, Kind[part.computation_type.value], part.microbatch_index))
                    for part in parts
                ]
            )
        found[name] = rows
    return found


@pytest.mark.parametrize("name", V_SHAPED)
def test_torch_csv_keeps_the_order(name: str) -> None:
    schedule = make_schedule(name, 3, 7)
    again = from_torch_csv(to_torch_csv(schedule), name=name)
    assert (again.lanes, again.placement) == (schedule.lanes, schedule.placement)


def test_sizes_and_replicas_are_refused() -> None:
    for name in V_SHAPED:
        with pytest.raises(BaPipeError, match="at least 1 micro-batch"):
            SCHEDULES[name](2, 0)
        with pytest.raises(BaPipeError, match="as many replicas of each stage"):
            make_schedule(name, 2, 4, replicas=[2, 1])
        with pytest.raises(BaPipeError, match="belongs to the schedules 1f1b and zb"):
            make_schedule(name, 2, 4, caps=[2, 2])
