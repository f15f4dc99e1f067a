"""Layers timed in two parts: what a profile says of them, what the cache keeps, and what does not fit."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn

from bapipe.cli.profile import profile_command
from bapipe.costs.profile import read_profile
from bapipe.models.layers import ModelRef, Split
from bapipe.torch.profiler import Measurement, MeasureSettings, Profiled, measure_units, profile_module
from bapipe.torch.profiler.assemble_profile import to_profile
from bapipe.torch.profiler.layer_memory import saved_storages
from bapipe.torch.profiler.layer_runner import RunnableLayer
from bapipe.torch.profiler.layer_times import part_costs
from bapipe.torch.profiler.measurement import (
    Environment,
    MeasuredLayer,
    PartTiming,
    Reading,
    SizeMemory,
    UnitTiming,
)
from bapipe.torch.profiler.statistics import SampleSummary
from bapipe.torch.zoo.gnmt import build_gnmt
from split_models import build_split_model


def profiled(folder: Path, *sizes: int, parts: bool = True, labels: list[str] | None = None) -> Profiled:
    """The model with layers that divide in every way, in single precision."""
    torch.manual_seed(0)
    module, args, kwargs = build_split_model("words")
    return profile_module(
        module,
        args,
        kwargs,
        model=ModelRef(name="words"),
        settings=MeasureSettings(microbatches=sizes, folder=folder, seconds=0.01, parts=parts),
        threads=1,
        report=lambda label, _: labels.append(label) if labels is not None else None,
    )


def test_every_layer_that_divides_has_part_costs(tmp_path: Path) -> None:
    found = profiled(tmp_path, 2, 4)
    table = found.profile.accelerators["cpu-core"]
    ways = [layer.split.by if layer.split else None for layer in found.profile.layers]
    assert {"output channels", "directions", "time steps", "vocabulary"} <= set(ways)
    for rows in (table.part_forward, table.part_backward, table.part_saved_activations):
        assert rows is not None
        for row in rows:
            assert all(value >= 0 for value in row)
            assert all(value == 0 for value, way in zip(row, ways, strict=True) if way is None)
    assert table.part_forward is not None
    assert max(max(row) for row in table.part_forward) > 0, "starting two layers takes longer than starting one"
    assert "layers in two parts timed at 2, 4" in table.description
    timed = {(item.layer, item.microbatch, item.round) for item in found.measured.parts}
    assert len(timed) == sum(way is not None for way in ways) * 2 * 2
    lstm = ways.index("time steps")
    first = found.measured.part_rounds(4, lstm)[0]
    assert all(reading.host.median > 0 for reading in (*first.forward, *first.backward))


def test_parts_that_take_other_inputs_than_the_layer(tmp_path: Path) -> None:
    """Part of GNMT's first LSTM takes an input of the model, for the size of its state; the layer does not."""
    torch.manual_seed(0)
    module, args, kwargs = build_gnmt(layers=4, sequence=4, hidden=8, vocabulary=20)
    found = profile_module(
        module,
        args,
        kwargs,
        model=ModelRef(name="gnmt"),
        settings=MeasureSettings(microbatches=(2,), folder=tmp_path, iterations=1, parts=True, whole=False),
        threads=1,
    )
    divided = [layer.name for layer in found.profile.layers if layer.split is not None]
    assert {"encoder.0", "decoder.0"} <= set(divided)
    timed = {found.profile.layers[item.layer].name for item in found.measured.parts}
    assert timed == set(divided)
    assert found.profile.accelerators["cpu-core"].part_saved_activations is not None


def test_parts_go_on_from_what_the_cache_has(tmp_path: Path) -> None:
    plain = profiled(tmp_path, 2, parts=False)
    assert plain.profile.accelerators["cpu-core"].part_forward is None
    labels: list[str] = []
    whole = profiled(tmp_path, 2, labels=labels)
    assert labels
    assert all(label.endswith(" in parts") for label in labels)
    assert whole.measured.timings == plain.measured.timings
    labels.clear()
    assert profiled(tmp_path, 2, labels=labels).profile == whole.profile
    assert labels == []
    assert profiled(tmp_path, 2, parts=False, labels=labels).profile == whole.profile, "what is known is told"
    assert labels == []


def test_bytes_that_both_parts_keep_beyond_the_layer(tmp_path: Path) -> None:
    """Of the first layer the second part keeps its half of ReLU's result beside the joined one, which is sent."""
    module = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
    found = profile_module(
        module,
        (torch.randn(2, 8),),
        model=ModelRef(name="small"),
        settings=MeasureSettings(microbatches=(1, 3), folder=tmp_path, iterations=2, parts=True),
        threads=1,
    )
    table = found.profile.accelerators["cpu-core"]
    assert table.part_saved_activations == tuple((16 * 4 * size / 2, 0.0) for size in (1, 3))


def test_a_size_whose_parts_do_not_fit_keeps_its_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = measure_units.time_parts

    def short(*args: Any, size: int, **rest: Any) -> PartTiming:
        if size > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        return real(*args, size=size, **rest)

    monkeypatch.setattr(measure_units, "time_parts", short)
    shares: list[float] = []
    torch.manual_seed(0)
    module, args, kwargs = build_split_model("pictures")
    found = profile_module(
        module,
        args,
        kwargs,
        model=ModelRef(name="pictures"),
        settings=MeasureSettings(microbatches=(2, 4), folder=tmp_path, seconds=0.01, parts=True),
        threads=1,
        report=lambda _, share: shares.append(share),
    )
    table = found.profile.accelerators["cpu-core"]
    assert (table.microbatches, table.not_fitting) == ((2, 4), ())
    assert found.measured.parts_not_fitting == (4,)
    assert found.complete
    assert shares == sorted(shares)
    assert shares[-1] == pytest.approx(1.0)
    assert table.part_forward is not None
    assert table.part_forward[1] == pytest.approx([2 * value for value in table.part_forward[0]])
    assert "layers in two parts timed at 2, at other sizes in proportion to the nearest" in table.description


def reading(host: float, device: float | None = None) -> Reading:
    def exactly(value: float) -> SampleSummary:
        return SampleSummary(median=value, low=value, high=value, count=3)

    return Reading(host=exactly(host), device=None if device is None else exactly(device))


def measured(whole: Reading, first: Reading, second: Reading) -> Measurement:
    """One layer that divides, and how long it and its parts take, forward and backward alike."""
    return Measurement(
        model="made",
        fingerprint="f",
        shapes=(),
        dtype="fp32",
        optimizer="sgd",
        environment=Environment(device="cpu", name="made", torch="2", threads=1),
        layers=(MeasuredLayer(name="a", parameters=4, weight_bytes=16.0, split=Split(channels=4)),),
        input_bytes=4.0,
        state_bytes=16.0,
        gradient_bytes=16.0,
        units=((0, 0),),
        shares_forward=(1.0,),
        shares_backward=(1.0,),
        empty_forward=reading(1.0),
        empty_backward=reading(1.0),
        timings=(
            UnitTiming(first=0, last=0, microbatch=8, round=0, forward=whole, backward=whole, input_gradient=None),
        ),
        memory=(
            SizeMemory(
                microbatch=8,
                boundary_forward=(4.0,),
                boundary_backward=(4.0,),
                saved_activations=(4.0,),
                workspace=(0.0,),
            ),
        ),
        parts=(
            PartTiming(
                layer=0,
                microbatch=8,
                round=0,
                forward=(first, second),
                backward=(first, second),
                saved_activations=24.0,
            ),
        ),
    )


def test_half_of_what_parts_take_beyond_the_layer() -> None:
    # Each is timed alone, so an empty layer's second is taken off each: 3 + 6 − 7 = 2.
    made = measured(reading(8.0), reading(4.0), reading(7.0))
    rows = part_costs(made, 8)
    assert rows is not None
    assert (rows.forward, rows.backward, rows.saved_activations) == ((1.0,), (1.0,), (12.0,))
    table = to_profile(made, accelerator="x", model=ModelRef(name="made")).table("x")
    assert (table.part_forward, table.part_backward, table.part_saved_activations) == (
        ((1.0,),),
        ((1.0,),),
        ((12.0,),),
    )


def test_parts_that_are_quicker_add_nothing_and_a_gpu_tells_its_own_time() -> None:
    quicker = part_costs(measured(reading(8.0), reading(3.0), reading(4.0)), 8)
    assert quicker is not None
    assert quicker.forward == (0.0,)
    device = part_costs(measured(reading(1.5, 10.0), reading(1.5, 6.0), reading(1.5, 7.0)), 8)
    assert device is not None
    assert device.forward == (1.5,)
    # Parts that the host issues more slowly than the device runs them take what the host takes: 3 + 3 − 4.
    issued = part_costs(measured(reading(4.0, 4.0), reading(4.0, 2.0), reading(4.0, 2.0)), 8)
    assert issued is not None
    assert issued.forward == (1.0,)


def test_a_layer_without_timings_of_parts_leaves_the_size_out() -> None:
    made = measured(reading(8.0), reading(4.0), reading(7.0))
    assert part_costs(replace(made, parts=()), 8) is None
    grouped = replace(made, units=((0, 1),))
    assert part_costs(grouped, 8) is None, "of a layer timed with its neighbour the part's record must tell it"


def test_the_command_times_parts_of_vgg16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BAPIPE_CACHE", str(tmp_path / "cache"))
    options = ["vgg16", "--microbatch", "1", "--threads", "1", "--iterations", "1", "--parts"]
    small = [f"--arg={item}" for item in ("image=32", "width=4", "hidden=12", "classes=7")]
    result = CliRunner().invoke(profile_command, [*options, *small, "-o", str(tmp_path / "vgg16.json")])
    assert result.exit_code == 0, result.output
    table = read_profile(tmp_path / "vgg16.json").table("cpu-core")
    assert table.part_forward is not None
    assert len(table.part_forward[0]) == 16
    assert "adds" in result.output


def test_nothing_is_left_of_a_forward_whose_values_are_weighed() -> None:
    """A ReLU saves its own output; handed back as it is, that output would hold its graph for ever."""
    layer = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    piece = RunnableLayer(
        first=0,
        last=0,
        run=lambda value: (layer(value),),
        parameters=tuple(layer.parameters()),
        receives=(True,),
        roots=(),
        overwrites=False,
    )
    (output,), saved = saved_storages(piece, [torch.randn(2, 4, requires_grad=True)])
    assert output.untyped_storage().data_ptr() in saved
    gone = weakref.ref(output)
    del output
    gc.collect()
    assert gone() is None
