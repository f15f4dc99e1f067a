"""Drawings in characters: exact for small schedules, honest and within their width for all."""

from __future__ import annotations

import io
import re
import sys
import tracemalloc
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from bapipe.errors import BaPipeError
from bapipe.reporting.drawing.labels import format_time, ticks
from bapipe.reporting.drawing.rows import rows_of, waits
from bapipe.reporting.drawing.time_cells import IDLE, WAITING, fill_cells, time_range
from bapipe.reporting.terminal import timeline_text as module
from bapipe.reporting.terminal.timeline_text import render_text
from bapipe.schedule.actions import Kind
from bapipe.schedule.generators import data_parallel, make_schedule, with_recompute, with_update
from bapipe.simulator.action_costs import Costs
from bapipe.simulator.simulate import simulate
from bapipe.simulator.timeline import Timeline, Transfers
from made_timelines import dense, predicted


def of_actions(
    actions: list[tuple[int, Kind, int, float, float]], *, num_ranks: int = 1, num_microbatches: int = 8
) -> Timeline:
    """A timeline of (rank, kind, micro-batch, start, end), one stage per rank."""
    ranks, kinds, microbatches, start, end = (np.array(column) for column in zip(*actions, strict=True))
    return Timeline(
        num_ranks=num_ranks,
        num_stages=num_ranks,
        num_microbatches=num_microbatches,
        kinds=kinds.astype(np.int64),
        stages=ranks.astype(np.int64),
        microbatches=microbatches.astype(np.int64),
        ranks=ranks.astype(np.int64),
        lanes=np.zeros(len(actions), np.int64),
        start=start.astype(float),
        end=end.astype(float),
        work=(end - start).astype(float),
        transfers=Transfers.none(),
    )


def drawing(timeline: Timeline, width: int, **options: object) -> str:
    return render_text(timeline, width=width, color=False, **options).plain  # type: ignore[arg-type]


def several() -> dict[str, Timeline]:
    replicated = with_update(with_recompute(make_schedule("1f1b-sno", 3, 6, replicas=[2, 1, 1])))
    uneven = Costs.of(
        3,
        forward=[0.002, 0.001, 0.001],
        backward=[0.0041, 0.002, 0.0023],
        transfer=0.0005,
        all_reduce=0.003,
        update=0.001,
    )
    names = ("gpipe", "1f1b-sno", "1f1b-so", "fbp-as", "interleaved", "zb-h2", "pipedream")
    return {
        **{name: predicted(name, 4, 12, forward=1.1, backward=1.7, transfer=0.3) for name in names},
        "replicated": simulate(replicated, uneven),
        "dense": dense(40, 60, later=1),
    }


GPIPE = """\
gpipe
rank 0 │F0──F1──F2──············B0══════B1══════B2══════
rank 1 │····F0──F1──F2──B0══════B1══════B2══════········
       └┴───────────────────┴───────────────────┴────────
        0                   5                   10
F── forward   B══ backward   · idle
time 12, bubble 25.0 %, one column 0.25"""

ONE_F_ONE_B = """\
0 │F0─F1─······B0════F2─B1════···B2════
1 │···F0─B0════F1─B1════F2─B2════······
  └┴──────────────┴──────────────┴──────
   0              5              10
F── forward   B══ backward   · idle
time 12, bubble 25.0 %
one column 0.333333"""

ON_LINKS = """\
rank 0 │F0─F1─·········~~~B0════F2─B1════······~~~B2════
rank 1 │···~~~F0─B0════F1─B1════···~~~F2─B2════·········
       └┴──────────────┴──────────────┴──────────────┴───
        0              5              10             15
F── forward   B══ backward   · idle
~ waiting for a transfer
time 16, bubble 43.8 %, one column 0.333333"""

FORWARD_AND_BACKWARD_AT_ONCE = """\
rank 0 fwd │F0──F1──F2──────────····························
rank 0 bwd │····················B0══════════B1══════B2══════
rank 1 fwd │····F0──F1──────────F2──────────················
rank 1 bwd │········B0══════════B1══════════B2══════········
           └┴───────────────────┴───────────────────┴────────
            0                   5                   10
F── forward   B══ backward   · idle
time 12, bubble 25.0 %, one column 0.25"""

INTERLEAVED = """\
rank 0 │0F0──0F1──2F0──2F1──··········2B0═══════·····2B1═══════0B0═══════0B1═══════
rank 1 │·····1F0──1F1──3F0──3B0═══════3F1──3B1═══════1B0═══════1B1═══════··········
       └┴───────────────────┴───────────────────┴───────────────────┴───────────────
        0                   2                   4                   6
F── forward   B══ backward   · idle
time 7.5, bubble 20.0 %, one column 0.1"""

SPLIT_BACKWARD = """\
rank 0 │F0───F1───F2───I0━━━W0╍╍╍I1━━━W1╍╍╍I2━━━W2╍╍╍·····
rank 1 │·····F0───I0━━━F1───I1━━━F2───I2━━━W0╍╍╍W1╍╍╍W2╍╍╍
       └┴────────────────────────┴────────────────────────┴
        0                        5                        10
F── forward   I━━ input gradient   W╍╍ weight gradient
· idle
time 10, bubble 10.0 %, one column 0.2"""

REPLICAS = """\
rank 0     │F0──B0══════F2──B2══════············U░
rank 0 a-r │                        A▒▒▒▒▒▒▒▒▒▒▒
rank 1     │F1──B1══════F3──B3══════············U░
rank 1 a-r │                        A▒▒▒▒▒▒▒▒▒▒▒
           └┴───────────────────┴──────────────────
            0                   5 s
F── forward   B══ backward   A▒▒ all-reduce
U░░ optimizer step   · idle
time 9.5 s, bubble 31.6 %, one column 250 ms"""


def test_gpipe_with_a_title() -> None:
    assert drawing(predicted("gpipe", 2, 3), 60, title="gpipe") == GPIPE


def test_one_f_one_b_in_the_fewest_columns() -> None:
    assert drawing(predicted("1f1b-sno", 2, 3), 40) == ONE_F_ONE_B


def test_waiting_for_a_transfer_is_shown() -> None:
    assert drawing(predicted("1f1b-sno", 2, 3, transfer=1), 60) == ON_LINKS


def test_backward_split_in_two() -> None:
    assert drawing(predicted("zb-h2", 2, 3), 60) == SPLIT_BACKWARD


def test_all_reduce_and_update() -> None:
    costs = Costs.of(1, forward=1, backward=2, all_reduce=3, update=0.5)
    assert drawing(simulate(data_parallel(2, 2), costs), 60, unit="s") == REPLICAS


def test_an_all_reduce_that_takes_no_time_has_no_row() -> None:
    costs = Costs.of(1, forward=1, backward=2)
    assert "a-r" not in drawing(simulate(data_parallel(2, 2), costs), 60)


def test_forward_and_backward_at_once_have_rows_of_their_own() -> None:
    assert drawing(predicted("fbp-as", 2, 3), 70) == FORWARD_AND_BACKWARD_AT_ONCE


def test_stages_are_named_where_a_rank_has_several_and_there_is_room() -> None:
    timeline = predicted("interleaved", 2, 2)
    assert drawing(timeline, 90) == INTERLEAVED
    assert drawing(timeline, 50).splitlines()[0] == "0 │F0─F1─F0─F1─······B0════···B1════B0════B1════"


def test_a_label_without_room_is_its_letter() -> None:
    actions = [(0, Kind.F, 9, 0, 1), (0, Kind.F, 10, 1, 3), (0, Kind.B, 9, 3, 6), (0, Kind.B, 10, 6, 36)]
    timeline = of_actions(actions, num_microbatches=11)
    assert drawing(timeline, 40).splitlines()[0] == "0 │FF─B9═B10" + "═" * 27


def test_middle_ranks_are_left_out() -> None:
    lines = drawing(dense(64, 2, later=1), 80, max_ranks=5).splitlines()
    names = [line.split("│")[0].strip() for line in lines[:6]]
    assert names == ["rank 0", "rank 1", "rank 2", "⋮       ⋮ ranks 3–61 not drawn", "rank 62", "rank 63"]
    assert "not drawn" not in drawing(dense(5, 2, later=1), 80, max_ranks=5)
    assert "⋮ rank 3 not drawn" in drawing(dense(6, 2, later=1), 80, max_ranks=5)


def test_the_middle_is_left_out_once_where_ranks_have_two_lanes() -> None:
    assert drawing(predicted("fbp-as", 8, 2), 80, max_ranks=4).count("not drawn") == 1


@pytest.mark.parametrize("name", several())
def test_never_wider_than_asked(name: str) -> None:
    timeline = several()[name]
    for width in range(40, 201):
        drawn = render_text(timeline, width=width, color=True, title="t" * 300, unit="s")
        for line in drawn.split("\n"):
            assert line.cell_len <= width


def test_wide_characters_in_a_title_count_double() -> None:
    first = render_text(predicted("gpipe", 2, 2), width=41, color=False, title="管" * 50).split("\n")[0]
    assert first.cell_len <= 41
    assert first.plain.endswith("…")


@pytest.mark.parametrize("color", [False, True])
def test_colour_codes_only_where_asked(color: bool) -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, color_system="truecolor", width=100)
    drawn = render_text(predicted("1f1b-so", 3, 4), width=100, color=color, title="[red]not markup[/red]\x1b[31m")
    console.print(drawn)
    assert ("\x1b" in stream.getvalue()) == color
    assert "[red]not markup[/red] [31m" in drawn.plain
    assert drawn.plain == drawing(predicted("1f1b-so", 3, 4), 100, title="[red]not markup[/red]\x1b[31m")


def test_what_goes_on_from_an_item_of_the_footer_shares_its_line() -> None:
    crowded = dense(8, 300, later=1)
    wide, narrow, least = (drawing(crowded, width).splitlines() for width in (120, 70, 40))
    assert wide[-1].startswith("time ")
    assert narrow[-2].startswith("time ")
    assert re.fullmatch("one column [0-9.]+, each showing what takes most of it", narrow[-1])
    assert least[-1] == "each showing what takes most of it"


def work(timeline: Timeline) -> tuple[int, int]:
    """Lines of Python run to draw it, and the most bytes held meanwhile."""
    lines = 0

    def count(_frame: object, event: str, _argument: object) -> Any:
        nonlocal lines
        lines += event == "line"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        render_text(timeline, width=200, color=True)
    finally:
        sys.settrace(before)
    tracemalloc.start()
    try:
        render_text(timeline, width=200, color=True)
        return lines, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_what_python_does_is_bounded_by_the_screen_and_arrays_are_linear_in_the_actions() -> None:
    few, many = work(dense(64, 256, later=1)), work(dense(64, 1024, later=1))
    assert many[0] < 1.5 * few[0]
    assert many[1] < 1.5 * 4 * few[1]


def test_each_cell_shows_what_takes_most_of_it() -> None:
    rng = np.random.default_rng(7)
    for _ in range(20):
        moments = np.sort(rng.uniform(0, 10, 60))
        actions = [
            (0, Kind(int(rng.integers(3))), number, moments[2 * number], moments[2 * number + 1])
            for number in range(30)
        ]
        timeline = of_actions(actions, num_microbatches=30)
        columns = int(rng.integers(5, 60))
        owners = fill_cells(timeline, rows_of(timeline), columns).owner[0]
        edges = np.linspace(0, time_range(timeline)[1], columns + 1)
        for column in range(columns):
            spent = dict.fromkeys(range(3), 0.0)
            for _, kind, _, start, end in actions:
                spent[kind] += max(0.0, min(end, edges[column + 1]) - max(start, edges[column]))
            idle = edges[column + 1] - edges[column] - sum(spent.values())
            owner = int(owners[column])
            shown = idle if owner == IDLE else spent[int(timeline.kinds[owner])]
            assert shown == pytest.approx(max(idle, *spent.values()), abs=1e-6)


def test_waits_are_the_exposed_communication() -> None:
    for timeline in several().values():
        lost = waits(timeline)
        own = np.bincount(timeline.ranks[lost.action], lost.end - lost.start, minlength=timeline.num_ranks)
        assert own == pytest.approx(np.array(timeline.exposed_communication()))


def test_waiting_cells_are_idle_ones() -> None:
    timeline = predicted("1f1b-sno", 3, 4, transfer=1)
    cells = fill_cells(timeline, rows_of(timeline), 200)
    assert (cells.owner == WAITING).any()
    assert cells.share[cells.owner == WAITING].sum(axis=1).max() <= 0.5


def test_a_recorded_clock_may_start_before_zero() -> None:
    lines = drawing(of_actions([(0, Kind.F, 0, -1, 1), (0, Kind.B, 0, 1, 3)]), 40).splitlines()
    assert lines[0] == "0 │F0────────────────B0════════════════"
    assert lines[2].index("0") == len("0 │F0───────")


def test_nothing_to_draw() -> None:
    instant = of_actions([(0, Kind.F, 0, 0, 0)])
    assert drawing(instant, 60, title="t").splitlines() == ["t", "no action takes any time: nothing to draw"]


def test_a_rank_without_actions_has_a_row() -> None:
    lines = drawing(of_actions([(0, Kind.F, 0, 0, 1)], num_ranks=2), 60).splitlines()
    assert set(lines[1].split("│")[1]) == {"·"}


def test_too_narrow() -> None:
    with pytest.raises(BaPipeError, match="at least 40 columns, got 39"):
        drawing(predicted("gpipe", 2, 2), 39)
    with pytest.raises(BaPipeError, match="at least 2 ranks, got 1"):
        drawing(predicted("gpipe", 2, 2), 40, max_ranks=1)


def test_times_for_people() -> None:
    assert [format_time(value, "s") for value in (0, 0.99996, 0.0153, 3834.2)] == ["0", "1 s", "15.3 ms", "3834 s"]
    assert [format_time(value, None) for value in (0, 12.5, 1 / 3)] == ["0", "12.5", "0.333333"]
    assert format_time(5, "cycles") == "5 cycles"


def test_ticks_are_round_and_few() -> None:
    assert ticks(33, 8) == [0, 5, 10, 15, 20, 25, 30]
    assert ticks(0.3, 4) == [0, 0.1, 0.2, 0.3]
    for span in (1e-9, 0.07, 1, 99, 12345):
        for most in range(2, 30):
            assert most / 3 <= len(ticks(span, most)) <= most


def test_exports() -> None:
    assert set(module.__all__) == {"MIN_WIDTH", "render_text"}
