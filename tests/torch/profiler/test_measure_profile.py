"""Real measurements of small models on the CPU: what a profile holds, what the cache keeps, what is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import nn

from bapipe.costs.profile import read_profile, write_profile
from bapipe.errors import BaPipeError
from bapipe.models.layers import ModelRef
from bapipe.torch.profiler import (
    MeasureSettings,
    Profiled,
    agreement,
    predicted_peak,
    profile_model,
    profile_module,
)
from bapipe.torch.profiler.measurement import read_measurement
from bapipe.torch.profiler.measurement_cache import cache_path, save_measurement
from measured_models import LIMIT


def settings(folder: Path, *sizes: int, **changes: object) -> MeasureSettings:
    return MeasureSettings(microbatches=sizes, folder=folder, seconds=0.01, **changes)  # type: ignore[arg-type]


def quick(folder: Path, model: str, *sizes: int, **changes: object) -> Profiled:
    return profile_model(f"measured_models:{model}", settings=settings(folder, *sizes), threads=1, **changes)  # type: ignore[arg-type]


def test_a_sequential_becomes_a_profile_of_its_layers(tmp_path: Path) -> None:
    found = quick(tmp_path, "sequential", 1, 4)
    profile = found.profile
    assert found.complete
    assert [layer.name for layer in profile.layers] == ["0", "1", "2", "4"]
    assert [layer.parameters for layer in profile.layers] == [288, 1056, 1056, 165]
    table = profile.accelerators["cpu-core"]
    assert (table.source, table.microbatches, table.not_fitting) == ("measured", (1, 4), ())
    assert f"torch {torch.__version__}" in table.description
    assert "1 threads" in table.description
    assert "sum of layers against the whole step 1: " in table.description
    assert table.weight_gradient is not None
    for row, size in enumerate(table.microbatches):
        assert sum(table.forward[row]) > 0
        assert sum(table.backward[row]) > 0
        assert all(0 <= w <= b for w, b in zip(table.weight_gradient[row], table.backward[row], strict=True))
        assert table.weight_gradient[row][0] == table.backward[row][0]  # the input has no gradient
        assert table.boundary_forward[row] == (128 * size, 128 * size, 128 * size, 20 * size)
    assert sum(table.update) > 0
    assert profile.input_bytes == 32
    write_profile(profile, tmp_path / "profile.json")
    assert read_profile(tmp_path / "profile.json") == profile


def test_saved_activations_counts_each_storage_once(tmp_path: Path) -> None:
    """Linear keeps its input, ReLU its output, which the next Linear keeps too."""
    module = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
    found = profile_module(
        module, (torch.randn(2, 8),), model=ModelRef(name="small"), settings=settings(tmp_path, 1, 3), threads=1
    )
    table = found.profile.accelerators["cpu-core"]
    for row, size in enumerate((1, 3)):
        assert table.saved_activations[row] == (32 * size, (128 + 16) * size)


def test_a_captured_model_with_skip_and_tied_weights(tmp_path: Path) -> None:
    found = quick(tmp_path, "residual", 2)
    profile = found.profile
    table = profile.accelerators["cpu-core"]
    assert profile.model.ref == "measured_models:residual"
    assert profile.model.fingerprint == found.measured.fingerprint
    assert len(profile.layers) >= 3
    tied = [layer for layer in profile.layers if layer.shares_weights_with]
    assert [layer.shares_weights_with for layer in tied] == [profile.layers[0].name]
    assert max(table.boundary_forward[0]) == 2 * 2 * 7 * 64 * 4, "the skip value crosses too"
    assert agreement(found.measured, 2) is not None
    assert predicted_peak(found.measured, 2) is None, "a CPU tells no peak"


@pytest.mark.parametrize(("dtype", "bytes_"), [("fp64", 8), ("bf16", 2)])
def test_dtypes_change_the_bytes(tmp_path: Path, dtype: str, bytes_: int) -> None:
    found = quick(tmp_path, "sequential", 1, precision=dtype)
    assert found.profile.dtype == dtype
    assert found.profile.layers[1].weight_bytes == 1056 * bytes_
    assert found.profile.accelerators["cpu-core"].boundary_forward[0][0] == 32 * bytes_


def test_a_second_run_measures_nothing_again(tmp_path: Path) -> None:
    first = quick(tmp_path, "sequential", 1, 2)
    labels: list[str] = []
    again = quick(tmp_path, "sequential", 1, 2, report=lambda label, _: labels.append(label))
    assert labels == []
    assert again.profile == first.profile
    more = quick(tmp_path, "sequential", 2, 3, report=lambda label, _: labels.append(label))
    assert {label.split(":")[0] for label in labels} == {"3"}
    assert more.profile.accelerators["cpu-core"].microbatches == (1, 2, 3)


def test_another_dtype_model_or_thread_count_is_another_entry(tmp_path: Path) -> None:
    base = quick(tmp_path, "sequential", 1).measured
    changed = [
        dataclasses.replace(base, dtype="bf16"),
        dataclasses.replace(base, fingerprint="other"),
        dataclasses.replace(base, environment=dataclasses.replace(base.environment, torch="2.11.0")),
        dataclasses.replace(base, environment=dataclasses.replace(base.environment, slice="25 %")),
    ]
    paths = {cache_path(item, tmp_path) for item in (base, *changed)}
    assert len(paths) == 5


def test_ctrl_c_keeps_what_was_measured_and_a_run_goes_on(tmp_path: Path) -> None:
    count = 0

    def interrupt(label: str, share: float) -> None:  # noqa: ARG001
        nonlocal count
        count += 1
        if count == 1:
            raise KeyboardInterrupt

    with pytest.raises(BaPipeError, match=r"nothing of sequential is measured completely; .* go on"):
        quick(tmp_path, "sequential", 1, report=interrupt)
    (file,) = (tmp_path / "profiles").glob("*.json")
    kept = read_measurement(file)
    assert len(kept.timings) == 1
    done = quick(tmp_path, "sequential", 1)
    assert done.complete
    assert set(kept.timings) <= set(done.measured.timings)
    assert done.measured.units == kept.units


def test_interrupted_after_a_round_it_gives_a_profile_of_that(tmp_path: Path) -> None:
    def interrupt(label: str, share: float) -> None:  # noqa: ARG001
        if label == "optimizer step":
            raise KeyboardInterrupt

    found = quick(tmp_path, "sequential", 1, report=interrupt)
    assert not found.complete
    assert found.profile.accelerators["cpu-core"].microbatches == (1,)


def test_a_damaged_cache_is_measured_again(tmp_path: Path) -> None:
    measured = quick(tmp_path, "sequential", 1).measured
    path = save_measurement(measured, tmp_path)
    path.write_text(path.read_text()[:500])
    assert quick(tmp_path, "sequential", 1).complete
    assert read_measurement(path).timings


def test_a_size_that_does_not_fit_is_recorded_and_the_rest_goes_on(tmp_path: Path) -> None:
    found = quick(tmp_path, "greedy", 1, LIMIT, 2 * LIMIT, 4 * LIMIT)
    table = found.profile.accelerators["cpu-core"]
    assert table.microbatches == (1, LIMIT)
    assert table.not_fitting == (2 * LIMIT, 4 * LIMIT)


def test_nothing_fits(tmp_path: Path) -> None:
    with pytest.raises(BaPipeError, match="a micro-batch of 8 does not fit on this device; profile smaller"):
        quick(tmp_path, "greedy", 8)


def test_a_layer_that_raises_keeps_what_was_measured(tmp_path: Path) -> None:
    quick(tmp_path, "picky", 1)
    with pytest.raises(BaPipeError, match="picky fails with a micro-batch of 8: ValueError: too many samples"):
        quick(tmp_path, "picky", 1, 8)
    labels: list[str] = []
    quick(tmp_path, "picky", 1, report=lambda label, _: labels.append(label))
    assert labels == []


def test_iterations_are_exact(tmp_path: Path) -> None:
    quick(tmp_path, "sequential", 1)
    rule = settings(tmp_path, 1, iterations=61)
    found = profile_model("measured_models:sequential", settings=rule, threads=1)
    counts: dict[int, int] = {}
    for item in found.measured.timings:
        counts[item.first] = counts.get(item.first, 0) + item.forward.host.count
    assert set(counts.values()) == {61}, "more than the cache had: measured anew"


def test_calibration_is_recorded_and_meets_the_whole_step(tmp_path: Path) -> None:
    plain = quick(tmp_path, "sequential", 2)
    scaled = quick(tmp_path, "sequential", 2, calibrate=True)
    one, two = plain.profile.accelerators["cpu-core"], scaled.profile.accelerators["cpu-core"]
    found = agreement(plain.measured, 2)
    assert found is not None
    assert sum(one.forward[0]) + sum(one.backward[0]) == pytest.approx(found.layers)
    assert sum(two.forward[0]) + sum(two.backward[0]) == pytest.approx(found.eager)
    assert "times scaled to the whole step; before that the sum of layers was off by 2: " in two.description


def test_a_type_of_ones_own(tmp_path: Path) -> None:
    assert set(quick(tmp_path, "sequential", 1, accelerator="mine").profile.accelerators) == {"mine"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device": "cuda:9"}, "there is no (CUDA )?device"),
        ({"device": "tpu"}, "a device is cpu, cuda or cuda:N, got 'tpu'"),
        ({"precision": "fp31"}, r"unknown precision 'fp31' \(did you mean 'fp32'\?\); use one of fp32"),
        ({"optimizer": "magic"}, "unknown optimizer 'magic'; known: sgd"),
        ({"threads": 0}, "at least 1 thread, got 0"),
    ],
)
def test_mistakes_are_one_clear_line(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    arguments = {"threads": 1, **changes}
    with pytest.raises(BaPipeError, match=message):
        profile_model("measured_models:sequential", settings=settings(tmp_path, 1), **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("vgg61", r"unknown model 'vgg61' \(did you mean 'vgg16'\?\)"),
        ("no_such_package:build", "cannot be imported: No module named 'no_such_package'; run in its folder"),
        ("measured_models:sequentail", r"has no function 'sequentail' \(did you mean 'sequential'\?\)"),
        (
            "measured_models:broken",
            r"called with \(\) failed: ValueError: no such size 1; correct it or the --arg",
        ),
        ("measured_models:wrong", r"returns a module without an example of its inputs; return \(module, args\)"),
    ],
)
def test_models_that_are_not_there_or_raise(tmp_path: Path, model: str, message: str) -> None:
    with pytest.raises(BaPipeError, match=message):
        profile_model(model, settings=settings(tmp_path, 1))


def test_sizes_under_one_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BaPipeError, match=r"micro-batch sizes must be at least 1, got \[0, 2\]"):
        quick(tmp_path, "sequential", 0, 2)
