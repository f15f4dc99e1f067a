"""Traces for Perfetto: valid JSON whose events are the timeline's, and nothing overlaps."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from bapipe.reporting import trace as module
from bapipe.reporting.trace import trace_events, trace_json
from bapipe.schedule.generators import data_parallel, make_schedule, with_update
from bapipe.simulator.action_costs import Costs
from bapipe.simulator.simulate import simulate
from bapipe.simulator.timeline import Timeline

NAMES = ("gpipe", "1f1b-sno", "1f1b-so", "interleaved", "zb-h2")


def predicted(name: str, num_stages: int, num_microbatches: int) -> Timeline:
    costs = Costs.of(num_stages, forward=1.1e-3, backward=np.pi * 1e-3, transfer=1e-4)
    if name == "interleaved":
        costs = costs.split(2)
    return simulate(make_schedule(name, num_stages, num_microbatches), costs)


def of_phase(events: list[dict[str, Any]], phase: str) -> list[dict[str, Any]]:
    return [event for event in events if event["ph"] == phase]


@pytest.mark.parametrize("name", NAMES)
def test_events_sum_to_the_busy_time(name: str) -> None:
    timeline = predicted(name, 4, 8)
    busy: dict[int, float] = defaultdict(float)
    for event in of_phase(trace_events(timeline), "X"):
        busy[event["tid"]] += event["dur"] * 1e-6
    assert [busy[tid] for tid in sorted(busy)] == pytest.approx(timeline.busy(), rel=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_actions_that_touch_do_not_overlap_in_whole_nanoseconds(name: str) -> None:
    """Perfetto nests slices that overlap, and some of its versions truncate to nanoseconds, others round."""
    for reader in (int, round):
        threads = defaultdict(list)
        for event in of_phase(trace_events(predicted(name, 4, 16)), "X"):
            threads[event["tid"]].append((reader(event["ts"] * 1000.0), reader(event["dur"] * 1000.0)))
        for slices in threads.values():
            slices.sort()
            for (start, length), (following, _) in pairwise(slices):
                assert start + length <= following


def test_a_small_trace() -> None:
    costs = Costs.of(2, forward=1e-6, backward=2e-6, transfer=1e-6)
    events = trace_events(simulate(make_schedule("gpipe", 2, 1), costs), name="run", process=2)
    assert [(event["name"], event["tid"], event["args"]) for event in of_phase(events, "M")] == [
        ("process_name", 0, {"name": "run"}),
        ("process_sort_index", 0, {"sort_index": 2}),
        ("thread_name", 1, {"name": "rank 0"}),
        ("thread_sort_index", 1, {"sort_index": 1}),
        ("thread_name", 2, {"name": "rank 1"}),
        ("thread_sort_index", 2, {"sort_index": 2}),
    ]
    assert {event["pid"] for event in events} == {3}
    slices = [
        (event["name"], event["cat"], event["tid"], event["ts"], event["dur"]) for event in of_phase(events, "X")
    ]
    assert slices == [
        ("0F0", "forward", 1, 0.0, 1.0),
        ("0B0", "backward", 1, 6.0, 2.0),
        ("1F0", "forward", 2, 2.0, 1.0),
        ("1B0", "backward", 2, 3.0, 2.0),
    ]
    assert of_phase(events, "X")[1]["args"] == {"stage": 0, "work_us": pytest.approx(2.0), "microbatch": 0}
    assert [(event["tid"], event["ts"]) for event in of_phase(events, "s")] == [(1, 0.0), (2, 3.0)]
    assert [(event["tid"], event["ts"]) for event in of_phase(events, "f")] == [(2, 2.0), (1, 6.0)]


def test_lanes_are_threads_and_the_global_batch_has_no_micro_batch() -> None:
    fbp = trace_events(simulate(make_schedule("fbp-as", 2, 3), Costs.of(2, forward=1, backward=2)))
    assert [event["args"]["name"] for event in fbp if event["name"] == "thread_name"] == [
        "rank 0 forward",
        "rank 0 backward",
        "rank 1 forward",
        "rank 1 backward",
    ]
    replicas = simulate(data_parallel(2), Costs.of(1, forward=1, backward=2, all_reduce=1, update=1))
    reduced = [event for event in trace_events(replicas) if event.get("cat") == "all-reduce"]
    assert [event["name"] for event in reduced] == ["0A", "0A"]
    assert all("microbatch" not in event["args"] for event in reduced)


def test_every_flow_starts_and_ends_in_a_slice() -> None:
    schedule = with_update(make_schedule("1f1b-so", 3, 4))
    timeline = simulate(schedule, Costs.of(3, forward=1, backward=2, transfer=0.5, update=1))
    events = trace_events(timeline)
    slices = {(event["tid"], event["ts"]): event for event in of_phase(events, "X")}
    starts, ends = ({event["id"]: event for event in of_phase(events, phase)} for phase in "sf")
    assert starts.keys() == ends.keys()
    assert len(starts) == len(timeline.transfers)
    for number, start in starts.items():
        source = slices[start["tid"], start["ts"]]
        target = slices[ends[number]["tid"], ends[number]["ts"]]
        assert ends[number]["bp"] == "e"
        assert source["args"]["microbatch"] == target["args"]["microbatch"]
        step = 1 if source["cat"] == "forward" else -1
        assert target["args"]["stage"] == source["args"]["stage"] + step


def test_predicted_and_measured_in_one_file() -> None:
    timelines = {"predicted": predicted("gpipe", 2, 3), 'measured "on" <gpu>\n': predicted("1f1b-so", 2, 3)}
    trace = json.loads(trace_json(timelines))
    assert trace["displayTimeUnit"] == "ms"
    events = trace["traceEvents"]
    names = {event["args"]["name"]: event["pid"] for event in events if event["name"] == "process_name"}
    assert names == {"predicted": 1, 'measured "on" <gpu>\n': 2}
    assert len(of_phase(events, "X")) == 2 * 2 * 2 * 3
    flows = [event["id"] for event in of_phase(events, "s")]
    assert len(set(flows)) == len(flows) == 12


def test_no_timelines() -> None:
    assert json.loads(trace_json({})) == {"traceEvents": [], "displayTimeUnit": "ms"}


def test_exports() -> None:
    assert set(module.__all__) == {"trace_events", "trace_json"}
