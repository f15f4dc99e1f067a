"""Computed costs: the formula, its limits, and known facts."""

from __future__ import annotations

import pytest

from bapipe.costs.profile import LayerCosts
from bapipe.costs.roofline import DEFAULT_COMPUTE, OPTIMIZER_PASSES, analytic_profile
from bapipe.errors import BaPipeError
from bapipe.hardware.catalog import find_type
from bapipe.hardware.cluster import AcceleratorType, Efficiency
from bapipe.models.builtin import builtin_model
from bapipe.models.layers import Layer, Model, Split

PLAIN = AcceleratorType(
    name="plain",
    kind="gpu",
    flops={"fp32": 1e12, "fp16": 4e12},
    memory=1e9,
    memory_bandwidth=1e9,
    execution="synchronous",
    efficiency=Efficiency(compute={"fp32": 0.5}, memory=1.0, half_seconds=0.0, launch=0.0),
)


def layer(**changes: object) -> Layer:
    values: dict[str, object] = {
        "name": "x",
        "kind": "linear",
        "forward_flops": 1e9,
        "parameters": 1000,
        "output_elements": 10.0,
        "saved_elements": 20.0,
        "moved_elements": 30.0,
    }
    return Layer(**{**values, **changes})  # type: ignore[arg-type]


def costs(*layers: Layer, kind: AcceleratorType = PLAIN, dtype: str = "fp32", batch: int = 1) -> LayerCosts:
    model = Model(name="m", layers=layers, input_elements=5.0)
    return analytic_profile(model, [kind], precision=dtype, microbatches=[batch]).at(kind.name, batch)


def changed(**values: object) -> AcceleratorType:
    fields = {"compute": {"fp32": 0.5}, "memory": 1.0, "half_seconds": 0.0, "launch": 0.0, **values}
    efficiency = Efficiency(**fields)  # type: ignore[arg-type]
    return AcceleratorType(
        name="plain", kind="gpu", flops=PLAIN.flops, memory=1e9, memory_bandwidth=1e9, execution="synchronous",
        efficiency=efficiency,
    )  # fmt: skip


def step_rate(model: str, accelerator: str, dtype: str, batch: int, **args: int | str) -> float:
    """Samples per second of one accelerator, update included."""
    kind = find_type(accelerator)
    profile = analytic_profile(builtin_model(model, **args), [kind], precision=dtype, microbatches=[batch])
    at = profile.at(kind.name, batch)
    return batch / float(at.forward.sum() + at.backward.sum() + at.update.sum())


def test_compute_bound_layer() -> None:
    at = costs(layer(name="first"), layer())
    assert at.forward[1] == pytest.approx(1e9 / 0.5e12)
    assert at.weight_gradient[1] == pytest.approx(at.forward[1])
    assert at.backward[1] == pytest.approx(2 * at.forward[1])


def test_first_layer_has_no_input_gradient() -> None:
    at = costs(layer(), layer(name="second"))
    assert at.backward[0] == pytest.approx(at.forward[0])


def test_memory_bound_layer() -> None:
    at = costs(layer(name="first"), layer(forward_flops=0.0, parameters=0, moved_elements=1e6), batch=2)
    assert at.forward[1] == pytest.approx(2 * 4e6 / 1e9)
    assert at.weight_gradient[1] == 0


def test_elementwise_work_adds_to_the_products() -> None:
    plain, with_norm = costs(layer()), costs(layer(moved_elements=1e6 + 30, elementwise_elements=1e6))
    assert with_norm.forward[0] - plain.forward[0] == pytest.approx(4e6 / 1e9)
    assert with_norm.backward[0] - plain.backward[0] == pytest.approx(1.5 * 4e6 / 1e9)


def test_products_of_values_cost_twice_in_the_backward_and_have_no_weight_gradient() -> None:
    at = costs(layer(name="first"), layer(weight_flops=0.25e9))
    assert at.weight_gradient[1] == pytest.approx(0.25 * at.forward[1])
    assert at.backward[1] == pytest.approx(2 * at.forward[1])


def test_half_of_the_efficiency_at_the_half_work_size() -> None:
    kind = changed(half_seconds=1e-3)
    assert costs(layer(), kind=kind).forward[0] == pytest.approx(2 * 1e9 / 0.5e12)
    assert costs(layer(), kind=kind, batch=99).forward[0] / 99 == pytest.approx(1e9 / 0.5e12, rel=0.011)
    assert costs(layer(kernels=4), kind=kind).forward[0] == pytest.approx((1 + 4) * 1e9 / 0.5e12)


def test_launch_is_paid_once_a_pass() -> None:
    at = costs(layer(), kind=changed(launch=1.0))
    assert at.forward[0] == pytest.approx(1.0, abs=0.01)
    assert at.backward[0] == pytest.approx(2.0, abs=0.01)


def test_parameters_are_read_as_often_as_said() -> None:
    heavy = {"forward_flops": 0.0, "parameters": 10**6, "moved_elements": 0.0}
    assert costs(layer(**heavy)).forward[0] == pytest.approx(4e-3)
    assert costs(layer(**heavy, weight_reads=0.0)).forward[0] == 0
    assert costs(layer(**heavy, weight_reads=3.0)).forward[0] == pytest.approx(12e-3)
    assert costs(layer(**heavy, weight_reads=0.0)).weight_gradient[0] == pytest.approx(4e-3)


def test_moved_elements_default_to_input_output_and_stash() -> None:
    at = costs(layer(moved_elements=None, forward_flops=0.0, parameters=0))
    assert at.forward[0] == pytest.approx(4 * (5 + 10 + 20) / 1e9)


def test_bytes_follow_dtype_and_batch() -> None:
    for dtype, size in (("fp32", 4), ("fp16", 2)):
        model = Model(name="m", layers=(layer(error_elements=0.0),), input_elements=5.0)
        profile = analytic_profile(model, [PLAIN], precision=dtype, microbatches=[8, 2])
        table = profile.accelerators["plain"]
        assert table.microbatches == (2, 8)
        assert table.boundary_forward == ((20.0 * size,), (80.0 * size,))
        assert table.boundary_backward == ((0.0,), (0.0,))
        assert table.saved_activations == ((40.0 * size,), (160.0 * size,))
        assert profile.layers[0].weight_bytes == 1000 * size
        assert profile.input_bytes == 5 * size


def test_update_moves_fp32_values_whatever_the_dtype() -> None:
    expected = OPTIMIZER_PASSES * 4 * 1000 / 1e9
    assert costs(layer(), dtype="fp32").update[0] == pytest.approx(expected)
    assert costs(layer(), dtype="fp16").update[0] == pytest.approx(expected)


def test_tied_weights_are_updated_and_counted_once() -> None:
    model = Model(name="m", layers=(layer(), layer(name="head", shares_weights_with="x")), input_elements=1.0)
    profile = analytic_profile(model, [PLAIN], precision="fp32", microbatches=[1])
    assert profile.layers[1].shares_weights_with == "x"
    assert list(profile.weight_bytes) == [4000, 0]
    assert profile.at("plain", 1).update[1] == 0
    assert profile.at("plain", 1).weight_gradient[1] > 0


def test_dtype_without_a_share_takes_the_default() -> None:
    assert costs(layer(), dtype="fp16").forward[0] == pytest.approx(1e9 / (4e12 * DEFAULT_COMPUTE))


def test_labels() -> None:
    split = Split(channels=4)
    model = Model(name="m", layers=(layer(split=split),), input_elements=1.0)
    profile = analytic_profile(model, [find_type("v100"), find_type("a100")], precision="fp16", microbatches=[1])
    assert profile.layers[0].split == split
    assert set(profile.accelerators) == {"v100-16", "a100-40"}
    table = profile.accelerators["v100-16"]
    assert table.source == "analytic"
    for part in ("roofline of v100-16", "112 TFLOP/s fp16 · 0.5", "720 GB/s", "30 µs", "assumptions"):
        assert part in table.description


def test_resnet50_on_a_v100_in_fp32() -> None:
    """Published training rates are 300 to 400 images/s."""
    assert 300 < step_rate("resnet50", "v100", "fp32", 64) < 400
    assert 300 < step_rate("resnet50", "v100", "fp32", 64, granularity="conv") < 400


def test_other_known_rates() -> None:
    """Wide bounds around published rates: A100 fp16 about 2500 images/s, Llama-7B on H100 about 10 k tokens/s."""
    assert 1500 < step_rate("resnet50", "a100", "fp16", 128) < 3000
    assert 7e3 < 4096 * step_rate("llama-7b", "h100", "bf16", 1) < 14e3


def test_vgg16_stays_under_what_winograd_reaches() -> None:
    """PipeDream's profile, with cuDNN's faster 3 × 3 convolutions, is 190 images/s; a roofline knows none."""
    assert 100 < step_rate("vgg16", "v100", "fp32", 128) < 190


def test_larger_microbatches_are_more_efficient() -> None:
    rates = [step_rate("resnet50", "v100", "fp32", batch) for batch in (1, 4, 16, 64)]
    assert rates == sorted(rates)


@pytest.mark.parametrize(
    ("dtype", "sizes", "message"),
    [
        ("fp8", [1], r"accelerator 'plain' has no peak for fp8; it has fp32, fp16: choose among them"),
        ("fp23", [1], r"unknown precision 'fp23' \(did you mean 'fp32'\?\)"),
        ("fp32", [], r"micro-batch sizes must be at least 1, got \[\]"),
        ("fp32", [4, 0], r"micro-batch sizes must be at least 1, got \[0, 4\]"),
    ],
)
def test_bad_requests(dtype: str, sizes: list[int], message: str) -> None:
    model = Model(name="m", layers=(layer(),), input_elements=1.0)
    with pytest.raises(BaPipeError, match=message):
        analytic_profile(model, [PLAIN], precision=dtype, microbatches=sizes)


def test_empty_requests() -> None:
    with pytest.raises(BaPipeError, match="model 'm' has no layers"):
        analytic_profile(
            Model(name="m", layers=(), input_elements=1.0), [PLAIN], precision="fp32", microbatches=[1]
        )
    with pytest.raises(BaPipeError, match="at least one accelerator type"):
        analytic_profile(
            Model(name="m", layers=(layer(),), input_elements=1.0), [], precision="fp32", microbatches=[1]
        )
