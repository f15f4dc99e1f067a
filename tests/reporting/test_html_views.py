"""What the report's pictures are drawn from: memory, layers, balance, fronts, and the script's columns."""

from __future__ import annotations

import base64
from dataclasses import astuple, replace
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bapipe.planner.plan_timeline import plan_timeline
from bapipe.records.plan import MemoryParts, Plan
from bapipe.records.run_record import to_timeline
from bapipe.reporting.charts.alternatives import alternatives_chart, pareto_front
from bapipe.reporting.charts.balance import balance_chart, balance_of
from bapipe.reporting.charts.frame import CHARACTER, Scale, log_ticks, short
from bapipe.reporting.charts.layer_costs import MOST_COLUMNS, layers_chart, stages_chart
from bapipe.reporting.charts.rank_memory import memory_chart
from bapipe.reporting.drawing.rows import rows_of, waits
from bapipe.reporting.html.document import make_subject, render_report
from bapipe.reporting.html.page_data import timeline_data
from bapipe.reporting.views.layer_view import LayerView, cuts_of, layer_view, shares_of
from bapipe.reporting.views.memory_view import memory_view
from bapipe.schedule.actions import Kind
from bapipe.units import format_seconds
from report_plans import SHAPES, planned, run_of

SVG = "{http://www.w3.org/2000/svg}"


def _untold(plan: Plan) -> Plan:
    """As a plan of before the stages told what they hold."""
    return replace(
        plan, stages=tuple(replace(stage, saved_bytes=None, memory_parts=None) for stage in plan.stages)
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_memory_adds_up_to_the_plan_s_peak(shape: str) -> None:
    plan, _ = planned(shape)
    timeline = plan_timeline(plan)
    exact, inferred = memory_view(plan, timeline), memory_view(_untold(plan), timeline)
    assert exact.exact
    assert not inferred.exact
    for view in (exact, inferred):
        for number, stage in enumerate(plan.stages):
            peaks = [rank.peak for rank in view.ranks if number in rank.stages]
            assert max(peaks) == pytest.approx(stage.memory_bytes, rel=1e-6)
    for view in (exact, inferred):
        for rank in view.ranks:
            parts = astuple(rank.parts)
            assert min(parts) >= 0.0
            assert sum(parts) == pytest.approx(rank.peak)
            drawn = sum(rank.beside_activations().values()) + rank.peak_activations
            assert drawn == pytest.approx(rank.peak, rel=1e-6)
    copies = {"sgd": 0, "momentum": 1, "adam": 2}[plan.optimizer]
    for rank in exact.ranks:
        weights, parts = sum(plan.stages[number].weight_bytes for number in rank.stages), rank.parts
        assert (parts.weights, parts.gradients) == pytest.approx((weights, weights))
        assert parts.optimizer == pytest.approx(copies * weights)
        assert parts.workspace == pytest.approx(max(plan.stages[n].workspace_bytes or 0.0 for n in rank.stages))
        assert rank.activations.min() >= -1.0
        assert rank.activations[-1] == pytest.approx(0, abs=1.0)
        assert (np.diff(rank.times) >= 0).all()


def test_memory_by_another_rule_is_not_split_wrongly() -> None:
    plan, _ = planned("straight")
    timeline = plan_timeline(plan)
    less = replace(plan, stages=tuple(replace(s, memory_bytes=1000.0) for s in plan.stages))
    ranks = memory_view(_untold(less), timeline).ranks
    assert [(rank.peak, rank.parts.buffers) for rank in ranks] == [(1000.0, 1000.0)] * 4


def test_the_report_shows_the_parts_that_stand_in_the_plan() -> None:
    plan, _ = planned("straight")
    parts = MemoryParts(weights=1.0, gradients=2.0, optimizer=3.0, activations=4.0, buffers=5.0, workspace=6.0)
    told = replace(plan, stages=tuple(replace(s, memory_parts=parts, memory_bytes=21.0) for s in plan.stages))
    view = memory_view(told, plan_timeline(plan))
    assert view.exact
    assert [rank.parts for rank in view.ranks] == [parts] * 4
    assert 'value="6.0"' in render_report(make_subject(told))


@pytest.mark.parametrize("shape", SHAPES)
def test_the_layers_of_a_stage_sum_up_to_it(shape: str) -> None:
    plan, profile = planned(shape)
    view = layer_view(plan, profile)
    assert [layer.name for layer in view.layers] == [layer.name for layer in profile.layers]
    assert sum(layer.weight_bytes for layer in view.layers) == pytest.approx(
        sum(stage.weight_bytes for stage in plan.stages)
    )
    for number, stage in enumerate(plan.stages):
        own = [layer for layer in view.layers if layer.stages == (number,)]
        split = bool(stage.fractions)
        total = sum(layer.forward for layer in own)
        assert total <= stage.forward * (1 + 1e-9) if split else total == pytest.approx(stage.forward)
    for index in range(len(view.layers)):
        shares = [shares_of(stage).get(index, 0.0) for stage in plan.stages]
        assert sum(shares) == pytest.approx(1.0)
    for field in ("forward", "backward"):
        whole = sum(getattr(stage, field) for stage in plan.stages)
        assert sum(getattr(layer, field) for layer in view.layers) == pytest.approx(whole)


@pytest.mark.parametrize("shape", SHAPES)
def test_cuts_fall_where_the_stages_meet(shape: str) -> None:
    plan, profile = planned(shape)
    cuts, layers = cuts_of(plan), layer_view(plan, profile).layers
    assert len(cuts) == len(plan.stages) - 1
    for cut in cuts:
        stage, after = plan.stages[cut.stage], plan.stages[cut.stage + 1]
        assert (cut.forward_bytes, cut.backward_bytes) == (stage.send_forward_bytes, after.send_backward_bytes)
        if cut.position == int(cut.position):
            assert cut.position == after.first_layer == stage.last_layer + 1
            assert layers[stage.last_layer].boundary_forward == pytest.approx(cut.forward_bytes)
        else:
            assert stage.last_layer == after.first_layer == int(cut.position)


def test_a_cut_inside_a_layer_lies_at_its_share_of_the_channels() -> None:
    plan, _ = planned("split layers")
    part = plan.stages[0].fractions[0]
    assert cuts_of(plan)[0].position == pytest.approx(part.layer + part.stop / part.of)
    assert part.stop < part.of


@pytest.mark.parametrize("shape", SHAPES)
def test_balance_is_the_stages_own_time(shape: str) -> None:
    plan, _ = planned(shape)
    balance = balance_of(plan, plan_timeline(plan))
    for stage, total in zip(plan.stages, balance.totals, strict=True):
        again = stage.forward if stage.recompute else 0.0
        assert total == pytest.approx((stage.forward + stage.backward + again) / len(stage.accelerators))
    assert 0 < balance.mean_over_slowest <= 1 + 1e-12


def test_measured_balance_stands_on_the_same_axis() -> None:
    plan, _ = planned("straight")
    predicted = balance_of(plan, plan_timeline(plan))
    measured = balance_of(plan, to_timeline(run_of(plan, slower=2.0)))
    assert measured.totals == pytest.approx([2 * total for total in predicted.totals])
    chart = ElementTree.fromstring(balance_chart(predicted, measured=measured).standalone())
    widths = {}
    for rect in chart.iter(f"{SVG}rect"):
        title = rect.find(f"{SVG}title")
        if title is not None and (title.text or "").startswith("stage 0 forward"):
            widths["measured" in (title.text or "")] = float(rect.get("width", 0))
    assert widths[True] == pytest.approx(2 * widths[False], rel=1e-3)


@pytest.mark.parametrize("slower", [None, 1.0, 1.04, 2.0])
def test_no_dashed_line_runs_through_a_bar_s_total(slower: float | None) -> None:
    plan, _ = planned("straight")
    predicted = balance_of(plan, plan_timeline(plan))
    uneven = replace(
        predicted,
        parts=tuple(
            tuple((kind, seconds * factor) for kind, seconds in stage)
            for stage, factor in zip(predicted.parts, np.linspace(0.8, 1.0, len(predicted.parts)), strict=True)
        ),
    )
    measured = None if slower is None else balance_of(plan, to_timeline(run_of(plan, slower=slower)))
    root = ElementTree.fromstring(balance_chart(uneven, measured=measured).standalone())
    dashed = [path for path in root.iter(f"{SVG}path") if path.get("class") in ("limit", "cut")]
    lines = [float(path.get("d", "").removeprefix("M").split(",")[0]) for path in dashed]
    assert len(lines) == (1 if measured is None else 2)
    totals = {format_seconds(total) for balance in (uneven, measured) if balance for total in balance.totals}
    labels = [text for text in root.iter(f"{SVG}text") if text.get("class") == "soft" and text.text in totals]
    assert len(labels) == len(plan.stages) * len(lines)
    for text in labels:
        start = float(text.get("x", 0))
        end = start + len(text.text or "") * CHARACTER
        assert not any(start - 2 < line < end + 2 for line in lines), text.text


def test_capacity_is_named_where_it_is_drawn() -> None:
    plan, _ = planned("straight")
    timeline = plan_timeline(plan)
    for capacity, shown in ((1.5, True), (50.0, False)):
        stages = tuple(replace(s, memory_capacity=s.memory_bytes * capacity) for s in plan.stages)
        chart = memory_chart(memory_view(replace(plan, stages=stages), timeline), time=timeline.makespan)
        assert ('class="limit"' in chart.body) is shown
        assert ("dashed: capacity" in chart.body) is shown


@pytest.mark.parametrize("shape", SHAPES)
def test_charts_are_well_formed_and_within_their_frame(shape: str) -> None:
    plan, profile = planned(shape)
    timeline = plan_timeline(plan)
    charts = [
        balance_chart(balance_of(plan, timeline)),
        memory_chart(memory_view(plan, timeline), time=timeline.makespan),
        memory_chart(memory_view(_untold(plan), timeline), time=timeline.makespan),
        layers_chart(layer_view(plan, profile)),
        stages_chart(plan),
        alternatives_chart(plan),
    ]
    for chart in charts:
        root = ElementTree.fromstring(chart.standalone())
        assert "nan" not in chart.body
        assert "inf" not in chart.body.replace("inferred", "")
        for rect in root.iter(f"{SVG}rect"):
            x, y, width, height = (float(rect.get(name, 0)) for name in ("x", "y", "width", "height"))
            assert min(x, y, width, height) >= -0.01, chart.name
            assert x + width <= 760.01, chart.name
            assert y + height <= chart.height + 0.01, chart.name


def test_many_layers_share_columns() -> None:
    plan, profile = planned("straight")
    layer = layer_view(plan, profile).layers[1]
    many = tuple(replace(layer, index=index, name=f"l{index}", stages=(0,)) for index in range(5000))
    chart = layers_chart(LayerView(layers=many, cuts=()))
    assert chart.body.count('class="F"') - 1 <= MOST_COLUMNS  # one is the legend's
    assert "5000 layers in" in chart.body


points = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=30)


@given(points)
def test_the_front_is_what_nothing_beats(found: list[tuple[int, int]]) -> None:
    front = [found[index] for index in pareto_front(found)]

    def beaten(point: tuple[int, int]) -> bool:
        return any(other != point and other[0] <= point[0] and other[1] <= point[1] for other in found)

    assert set(front) == {point for point in found if not beaten(point)}
    assert front == sorted(set(front))


def column(data: dict[str, Any], name: str, dtype: str) -> Any:
    return np.frombuffer(base64.b64decode(data[name]), dtype)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_script_gets_every_action_where_it_is(shape: str) -> None:
    plan, _ = planned(shape)
    timeline = plan_timeline(plan)
    data = timeline_data(timeline, name="predicted")
    order = np.concatenate([row.actions for row in rows_of(timeline)])
    assert (column(data, "kind", "<u1") == timeline.kinds[order]).all()
    assert (column(data, "stage", "<u2") == timeline.stages[order]).all()
    assert (column(data, "microbatch", "<i4") == timeline.microbatches[order]).all()
    start, end = (data["low"] + column(data, name, "<u4") * data["tick"] for name in ("start", "finish"))
    assert start == pytest.approx(timeline.start[order], abs=timeline.makespan * 1e-9)
    assert end == pytest.approx(timeline.end[order], abs=timeline.makespan * 1e-9)
    assert sum(row["count"] for row in data["rows"]) == len(timeline.kinds)
    sent = data["transfers"]
    source = column(sent, "source", "<i4")
    assert (order[source] == timeline.transfers.source).all()
    fed = column(sent, "fed", "<i4")
    kinds = column(data, "kind", "<u1")
    forward = kinds[source] == Kind.F
    assert (kinds[fed[forward]] == Kind.F).all()
    assert len(column(data["waits"], "action", "<i4")) == len(waits(timeline).action)


def test_actions_that_touch_still_touch() -> None:
    plan, _ = planned("straight")
    timeline = plan_timeline(plan)
    data = timeline_data(timeline, name="x")
    start, finish = column(data, "start", "<u4"), column(data, "finish", "<u4")
    first = 0
    for row in data["rows"]:
        own = slice(first, first + row["count"])
        assert (start[own][1:] >= finish[own][:-1]).all()
        first += row["count"]


def test_features_over_time_peak_where_the_peak_is() -> None:
    plan, _ = planned("straight")
    timeline = plan_timeline(plan)
    saved_activations = [float(3 + number) for number in range(4)]
    series = timeline.bytes_over_time(saved_activations)
    assert [float(level.max()) for _, level in series] == timeline.peak_bytes_by_rank(saved_activations)


def test_text_is_cut_without_control_characters() -> None:
    assert short("a\nb\u202ec") == "a b c"
    assert short("x" * 61) == "x" * 59 + "…"
    assert short("x" * 60) == "x" * 60


def test_logarithmic_scales() -> None:
    scale = Scale(low=1.0, high=100.0, start=0.0, end=200.0, logarithmic=True)
    assert [scale(value) for value in (1.0, 10.0, 100.0)] == pytest.approx([0.0, 100.0, 200.0])
    assert log_ticks(1.0, 100.0) == [1, 2, 5, 10, 20, 50, 100]
    assert log_ticks(1.0, 1e6, 8) == [10.0**power for power in range(7)]
