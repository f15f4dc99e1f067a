"""The orders, drawn. A row is a lane; `F1` is the forward of micro-batch 1."""

from __future__ import annotations

from textwrap import dedent

import pytest

from bapipe.errors import BaPipeError
from bapipe.schedule.actions import Action, Kind, Lane, Schedule
from bapipe.schedule.generators import (
    SCHEDULES,
    capped,
    data_parallel,
    fbp_as,
    interleaved,
    make_schedule,
    with_recompute,
    with_update,
)
from bapipe.schedule.inflight import full_overlap_caps
from bapipe.schedule.v_shape import V_SHAPED
from bapipe.schedule.zero_bubble import zero_bubble
from bapipe.simulator.action_costs import Costs
from bapipe.simulator.simulate import simulate


def drawn(schedule: Schedule, *, stages: bool = False) -> str:
    """A line per lane; with `stages` each action keeps its stage, as in `2F0`."""
    lines = []
    for lane in schedule.lanes:
        cells = (str(action) if stages else str(action)[len(str(action.stage)) :] for action in lane)
        lines.append(f"{lane.rank} " + " ".join(cells))
    return "\n".join(lines)


def picture(text: str) -> str:
    return dedent(text).strip("\n")


def test_gpipe() -> None:
    assert drawn(make_schedule("gpipe", 2, 3)) == picture("""
        0 F0 F1 F2 B0 B1 B2
        1 F0 F1 F2 B0 B1 B2
    """)


def test_1f1b_sno() -> None:
    assert drawn(make_schedule("1f1b-sno", 3, 4)) == picture("""
        0 F0 F1 F2 B0 F3 B1 B2 B3
        1 F0 F1 B0 F2 B1 F3 B2 B3
        2 F0 B0 F1 B1 F2 B2 F3 B3
    """)


def test_1f1b_so() -> None:
    assert drawn(make_schedule("1f1b-so", 2, 5)) == picture("""
        0 F0 F1 F2 F3 B0 F4 B1 B2 B3 B4
        1 F0 F1 B0 F2 B1 F3 B2 F4 B3 B4
    """)


def test_1f1b_with_any_cap() -> None:
    schedule = make_schedule("1f1b", 3, 4, caps=[3, 3, 1])
    assert schedule.caps == (3, 3, 1)
    assert drawn(schedule) == picture("""
        0 F0 F1 F2 B0 F3 B1 B2 B3
        1 F0 F1 F2 B0 F3 B1 B2 B3
        2 F0 B0 F1 B1 F2 B2 F3 B3
    """)


def test_a_cap_beyond_the_microbatches_is_gpipe() -> None:
    assert drawn(capped(2, 3, [9, 9])) == drawn(make_schedule("gpipe", 2, 3))


def test_1f1b_as_is_the_order_of_sno_on_cut_through_links() -> None:
    schedule = make_schedule("1f1b-as", 3, 4)
    assert drawn(schedule) == drawn(make_schedule("1f1b-sno", 3, 4))
    assert schedule.sending == "cut-through"


def test_fbp_as_has_two_lanes_per_rank() -> None:
    schedule = make_schedule("fbp-as", 2, 3)
    assert drawn(schedule) == picture("""
        0 F0 F1 F2
        0 B0 B1 B2
        1 F0 F1 F2
        1 B0 B1 B2
    """)
    assert (schedule.caps, schedule.sending, schedule.concurrency) == ((4, 2), "cut-through", "slots")
    assert fbp_as(2, 3, slots="static").concurrency == "static"


def test_pipedream_never_flushes_and_keeps_versions() -> None:
    schedule = make_schedule("pipedream", 3, 4)
    assert drawn(schedule) == drawn(make_schedule("1f1b-sno", 3, 4))
    assert (schedule.flushes, schedule.weight_versions) == (False, (3, 2, 1))


def test_interleaved() -> None:
    schedule = interleaved(2, 4, virtual=2)
    assert schedule.placement == ((0,), (1,), (0,), (1,))
    assert drawn(schedule, stages=True) == picture("""
        0 0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3
        1 1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3
    """)


def test_interleaved_with_a_short_last_group() -> None:
    """Three micro-batches on two ranks: the fourth is left out of the order of four."""
    assert drawn(interleaved(2, 3, virtual=2), stages=True) == picture("""
        0 0F0 0F1 2F0 2F1 0F2 2B0 2B1 2F2 0B0 0B1 2B2 0B2
        1 1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1B1 3F2 3B2 1B2
    """)


def test_zb_h1() -> None:
    """W waits until a stage holds N micro-batches, so that it fills the bubble of 1F1B."""
    assert drawn(make_schedule("zb-h1", 3, 4)) == picture("""
        0 F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3
        1 F0 F1 I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
        2 F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3
    """)


def test_zb_h2() -> None:
    assert drawn(make_schedule("zb-h2", 2, 4)) == picture("""
        0 F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3
        1 F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3
    """)


def test_zb_with_caps_and_delays_of_its_own() -> None:
    """As many forwards ahead as slow links need; W as far behind as each stage's memory allows."""
    schedule = zero_bubble(2, 4, [3, 1], delays=[1, 0])
    assert drawn(schedule) == picture("""
        0 F0 F1 F2 I0 F3 I1 W0 I2 W1 I3 W2 W3
        1 F0 I0 W0 F1 I1 W1 F2 I2 W2 F3 I3 W3
    """)
    assert schedule.caps == (4, 1)
    assert schedule.parted_stages() == {0, 1}
    assert make_schedule("1f1b", 2, 4, caps=[3, 1]).parted_stages() == set()
    timeline = simulate(schedule, Costs.of(2, forward=1.0, backward=2.0))
    assert timeline.peak_in_flight() == [4, 1]
    assert zero_bubble(3, 4, [3, 2, 1]).lanes == make_schedule("zb-h1", 3, 4).lanes
    assert make_schedule("zb", 2, 4, caps=[3, 1]).lanes == make_schedule("zb-h2", 2, 4).lanes
    with pytest.raises(BaPipeError, match="2 stages need 2 delays of at least 0"):
        zero_bubble(2, 4, [3, 1], delays=[-1, 0])
    with pytest.raises(BaPipeError, match="zb needs --in-flight, one K per stage"):
        make_schedule("zb", 2, 4)


@pytest.mark.parametrize("name", [*SCHEDULES])
def test_one_stage_and_one_microbatch(name: str) -> None:
    schedule = make_schedule(name, 1, 1, virtual=1)
    if name in V_SHAPED:
        assert schedule.stages_of(0) == (0, 1)
        return
    assert {str(action) for lane in schedule.lanes for action in lane} in ({"0F0", "0B0"}, {"0F0", "0I0", "0W0"})


def test_replicas_take_microbatches_in_turn() -> None:
    """Stage 0 on ranks 0 and 1, each with ⌈K/2⌉ micro-batches at most; stage 1 on rank 2."""
    schedule = make_schedule("1f1b-sno", 2, 5, replicas=[2, 1])
    assert schedule.placement == ((0, 1), (2,))
    assert schedule.caps == (4, 1)
    assert drawn(schedule) == picture("""
        0 F0 F2 B0 F4 B2 B4
        1 F1 F3 B1 B3
        2 F0 B0 F1 B1 F2 B2 F3 B3 F4 B4
    """)


def test_data_parallel_is_one_replicated_stage() -> None:
    assert drawn(data_parallel(2, 2)) == picture("""
        0 F0 B0 F2 B2 U
        1 F1 B1 F3 B3 U
        0 A
        1 A
    """)


def test_with_recompute() -> None:
    schedule = make_schedule("1f1b-sno", 2, 2)
    assert drawn(with_recompute(schedule)) == picture("""
        0 F0 F1 R0 B0 R1 B1
        1 F0 R0 B0 F1 R1 B1
    """)
    assert drawn(with_recompute(schedule, [0])) == picture("""
        0 F0 F1 R0 B0 R1 B1
        1 F0 B0 F1 B1
    """)


def test_with_update() -> None:
    assert drawn(with_update(make_schedule("gpipe", 2, 1))) == picture("""
        0 F0 B0 U
        1 F0 B0 U
    """)
    assert drawn(with_update(interleaved(2, 2, virtual=2)), stages=True).splitlines()[0].endswith("0B0 0B1 2U 0U")


def test_with_update_of_fbp_follows_the_backwards() -> None:
    assert drawn(with_update(make_schedule("fbp-as", 1, 2))) == picture("""
        0 F0 F1
        0 B0 B1 U
    """)


@pytest.mark.parametrize(
    ("forward", "backward", "sends", "caps"),
    [
        ([10], [20], [], (1,)),
        ([10] * 4, [20] * 4, [0] * 3, (4, 3, 2, 1)),
        ([10] * 4, [20] * 4, [15] * 3, (7, 5, 3, 1)),
        ([10] * 4, [20] * 4, [16] * 3, (10, 7, 4, 1)),
        # The slow last stage sets the period of 100; the others need no second micro-batch for so little work.
        ([1, 1, 40], [1, 1, 60], [1, 1], (2, 2, 1)),
    ],
)
def test_full_overlap_caps(
    forward: list[float], backward: list[float], sends: list[float], caps: tuple[int, ...]
) -> None:
    assert full_overlap_caps(forward, backward, sends, sends) == caps


def test_full_overlap_caps_ignore_rounding() -> None:
    """0.1 + 0.2 is a hair over 0.3; that is not one more micro-batch in flight."""
    assert full_overlap_caps([0.1] * 3, [0.2] * 3, [0.15] * 2, [0.15] * 2) == (5, 3, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "1f1b-sn"}, "unknown schedule '1f1b-sn'.*did you mean '1f1b-sno'"),
        ({"name": "zbh1"}, "did you mean 'zb-h1'"),
        ({"num_stages": 0}, "at least 1 stage, got 0"),
        ({"num_stages": -3}, "at least 1 stage, got -3"),
        ({"num_microbatches": 0}, "at least 1 micro-batch, got 0"),
        ({"name": "1f1b"}, "1f1b needs --in-flight"),
        ({"name": "1f1b", "caps": [1]}, "2 stages need 2 caps, got 1"),
        ({"name": "1f1b", "caps": [2, 0]}, "a cap must be at least 1, got 0"),
        ({"caps": [2, 1]}, "--in-flight belongs to the schedules 1f1b and zb"),
        ({"replicas": [2]}, "2 stages need 2 replica counts"),
        ({"replicas": [0, 1]}, "of at least 1"),
        ({"name": "fbp-as", "replicas": [2, 1]}, "fbp-as runs without replicated stages"),
        ({"name": "zb-h1", "replicas": [2, 1]}, "zb-h1 runs with as many replicas of each stage"),
        ({"name": "interleaved", "virtual": 0}, "at least 1 stage per rank, got 0"),
        ({"name": "fbp-as", "slots": "tables"}, "unknown slot rule 'tables'.*did you mean 'table'"),
    ],
)
def test_mistakes(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(BaPipeError, match=message):
        make_schedule(**{"name": "gpipe", "num_stages": 2, "num_microbatches": 4, **arguments})  # type: ignore[arg-type]


class TestActions:
    @pytest.mark.parametrize("text", ["0F0", "12B345", "3I1", "3W1", "2R7", "4A", "4U"])
    def test_text_and_back(self, text: str) -> None:
        assert str(Action.parse(text)) == text

    @pytest.mark.parametrize("text", ["", "F0", "2F", "2X0", "2A3", "-1F0", "1F0x", "99999999F0", "2F0\n2F1"])
    def test_nonsense(self, text: str) -> None:
        with pytest.raises(BaPipeError, match="an action looks like 2F0"):
            Action.parse(text)

    def test_lane_is_a_list_of_actions(self) -> None:
        actions = [Action(1, Kind.F, 0), Action(1, Kind.B, 0), Action(1, Kind.U)]
        lane = Lane.of(3, actions)
        assert list(lane) == actions
        assert lane == Lane.of(3, actions)
        assert lane != Lane.of(2, actions)

    def test_schedule_knows_where_its_stages_live(self) -> None:
        schedule = make_schedule("1f1b-sno", 2, 4, replicas=[2, 1])
        assert (schedule.num_ranks, schedule.num_actions) == (3, 16)
        assert [schedule.rank_of(0, m) for m in range(4)] == [0, 1, 0, 1]
        assert interleaved(2, 2, virtual=3).stages_of(1) == (1, 3, 5)
