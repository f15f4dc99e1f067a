"""Layer times from traces: one that PyTorch wrote, and one made as a GPU's are."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bapipe import plan, read_profile, write_profile
from bapipe.analysis.trace_times import profile_of_trace, read_trace_times
from bapipe.costs.profile import Profile
from bapipe.errors import BaPipeError
from command import bapipe
from made_profiles import made_profile


def profile() -> Profile:
    made = made_profile({"cpu": [3.0, 6.0, 3.0]}, boundary=[8, 8, 0], saved_activations=[4, 4, 4])
    modules = (("a",), ("b.0", "b"), ("b.1", "b"))
    return replace(
        made,
        layers=tuple(replace(layer, modules=own) for layer, own in zip(made.layers, modules, strict=True)),
    )


def event(
    category: str, name: str, start: float, length: float, *, thread: int = 1, **args: Any
) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "ts": start,
        "dur": length,
        "pid": 1,
        "tid": thread,
        "args": args,
    }


def written(path: Path, events: list[dict[str, Any]]) -> str:
    path.write_text(json.dumps({"traceEvents": [{"ph": "M", "name": "process_name"}, *events]}))
    return str(path)


def host_events() -> list[dict[str, Any]]:
    """Forward on thread 1: a 10 us, b 30 us of which b.0 has 20; backward on thread 2: 25, 45 and 5 us."""
    found = []
    for call in range(2):
        at, number = 1000.0 * call, 10 * call
        found += [
            event("user_annotation", "a", at, 10),
            event("cpu_op", "aten::linear", at + 1, 8, **{"Sequence number": number, "Fwd thread id": 0}),
            event("user_annotation", "b", at + 20, 30),
            event("user_annotation", "b.0", at + 21, 20),
            event("cpu_op", "aten::linear", at + 22, 9, **{"Sequence number": number + 1, "Fwd thread id": 0}),
            event("cpu_op", "aten::mul", at + 42, 5, **{"Sequence number": number + 2, "Fwd thread id": 0}),
            event("user_annotation", "something else", at, 99),
        ]
        for sequence, start, length in ((2, 100, 5), (1, 110, 45), (0, 160, 25)):
            name = "autograd::engine::evaluate_function: MmBackward0"
            numbers = {"Sequence number": number + sequence, "Fwd thread id": 1}
            found.append(event("cpu_op", name, at + start, length, thread=2, **numbers))
    return found


def test_a_backward_is_its_forwards_by_the_number_that_autograd_gave_it(tmp_path: Path) -> None:
    found = read_trace_times(written(tmp_path / "t.json", host_events()), ["a", "b", "b.0", "b.1"])
    assert found.calls == 2
    assert not found.device
    assert found.forward == pytest.approx({"a": 10e-6, "b": 10e-6, "b.0": 20e-6})
    assert found.backward == pytest.approx({"a": 25e-6, "b": 5e-6, "b.0": 45e-6})


def test_kernels_count_where_they_were_launched(tmp_path: Path) -> None:
    events = host_events()
    for index, (thread, launched, length) in enumerate(((1, 2, 3), (1, 25, 7), (2, 120, 11), (2, 161, 13))):
        for call in range(2):
            number = 10 * index + call
            events.append(
                event("cuda_runtime", "launch", 1000.0 * call + launched, 1, thread=thread, correlation=number)
            )
            events.append(event("kernel", "gemm", 5000 + number, length, thread=7, correlation=number))
    found = read_trace_times(written(tmp_path / "t.json", events), ["a", "b", "b.0"])
    assert found.device
    assert found.forward == pytest.approx({"a": 3e-6, "b": 0.0, "b.0": 7e-6})
    assert found.backward == pytest.approx({"a": 13e-6, "b": 0.0, "b.0": 11e-6})


def test_a_module_of_several_layers_is_shared_among_them(tmp_path: Path) -> None:
    made, _ = profile_of_trace(
        profile(), written(tmp_path / "t.json", host_events()), accelerator="gpu", microbatch=2
    )
    table = made.accelerators["gpu"]
    assert table.microbatches == (2,)
    assert table.forward[0] == pytest.approx((10e-6, 20e-6 + 10e-6 * 2 / 3, 10e-6 / 3))
    assert table.boundary_forward[0] == (16.0, 16.0, 0.0)
    assert made.accelerators["cpu"] == profile().accelerators["cpu"]


def test_the_command_writes_a_profile_that_plans(tmp_path: Path) -> None:
    write_profile(profile(), tmp_path / "base.json")
    written(tmp_path / "t.json", host_events())
    done = bapipe("import-trace", "t.json", "--profile", "base.json", "--accelerator", "v100-16",
                  "--micro-batch", "2", "-o", "new.json", folder=tmp_path)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "2 calls: forward 40 µs, backward 75 µs each, times of the host" in done.stdout
    assert plan(read_profile(tmp_path / "new.json"), "2xv100", global_batch=8).prediction.source == "measured"


def test_what_a_trace_lacks_is_said(tmp_path: Path) -> None:
    path = written(tmp_path / "t.json", [item for item in host_events() if item["name"] != "a"])
    with pytest.raises(BaPipeError, match="has no time for layer 'layer0'"):
        profile_of_trace(profile(), path, accelerator="gpu", microbatch=2)
    with pytest.raises(BaPipeError, match=r"no annotations .* such as 'a'; put torch.profiler.record_function"):
        read_trace_times(written(tmp_path / "e.json", []), ["a"])
    with pytest.raises(BaPipeError, match="bytes at micro-batches of 1, 2, 4, not 3"):
        profile_of_trace(profile(), path, accelerator="gpu", microbatch=3)
    bare = replace(profile(), layers=tuple(replace(layer, modules=()) for layer in profile().layers))
    with pytest.raises(BaPipeError, match="does not say which modules its layers are; profile it again"):
        profile_of_trace(bare, path, accelerator="gpu", microbatch=2)
    with pytest.raises(BaPipeError, match="has no accelerator's bytes; profile it again"):
        profile_of_trace(replace(profile(), accelerators={}), path, accelerator="gpu", microbatch=2)


@pytest.mark.parametrize(
    ("category", "change", "message"),
    [
        (
            "user_annotation",
            {"dur": -1.0},
            "'a' begins at 0.0 and lasts -1.0 microseconds, which no profiler writes",
        ),
        ("user_annotation", {"ts": 10**40}, "'a' begins at 1000000"),
        ("user_annotation", {"dur": 1e300}, "lasts 1e+300 microseconds"),
        ("cpu_op", {"args": {"Sequence number": [1]}}, None),
        ("cuda_runtime", {"args": {"correlation": {}}}, None),
        ("kernel", {"args": {"correlation": [1]}}, None),
    ],
)
def test_a_trace_with_strange_events_is_refused_or_does_without_them(
    tmp_path: Path, category: str, change: dict[str, Any], message: str | None
) -> None:
    events = [*host_events(), event("cuda_runtime", "launch", 1, 1, correlation=1), event("kernel", "k", 5, 1)]
    events = [{**one, **change} if one["cat"] == category else one for one in events]
    path = written(tmp_path / "t.json", events)
    if message is None:
        assert read_trace_times(path, ["a", "b", "b.0"]).calls == 2
        return
    with pytest.raises(BaPipeError, match=re.escape(message)):
        read_trace_times(path, ["a", "b", "b.0"])


def test_a_module_takes_no_time_less_than_none(tmp_path: Path) -> None:
    """Where one inside of it is said to end after it."""
    events = [event("user_annotation", "b", 0, 10), event("user_annotation", "b.0", 2, 30)]
    found = read_trace_times(written(tmp_path / "t.json", events), ["b", "b.0"])
    assert found.forward == pytest.approx({"b": 2e-6, "b.0": 30e-6})


def test_a_trace_of_pytorchs_profiler_is_read(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from torch.profiler import ProfilerActivity, record_function
    from torch.profiler import profile as trace

    layers = {name: torch.nn.Linear(8, 8) for name in ("a", "b.0", "b.1")}
    with trace(activities=[ProfilerActivity.CPU]) as found:
        for _ in range(3):
            value = torch.ones(2, 8)
            for name, layer in layers.items():
                with record_function(name):
                    value = layer(value)
            value.sum().backward()
    found.export_chrome_trace(str(tmp_path / "t.json"))
    times = read_trace_times(str(tmp_path / "t.json"), list(layers))
    assert times.calls == 3
    assert all(times.forward[name] > 0 and times.backward[name] > 0 for name in layers)
