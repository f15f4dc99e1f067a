"""The host's time to issue layers in a step: a real step is timed, and what becomes of the times."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from bapipe.hardware.precision import find_precision
from bapipe.models.layers import ModelRef
from bapipe.torch.profiler.assemble_profile import agreement, to_profile
from bapipe.torch.profiler.launch_overhead import StepIssue, empty_issue
from bapipe.torch.profiler.layer_runner import chain_of, tensors_of
from bapipe.torch.profiler.layer_times import layer_times, model_times, parts
from bapipe.torch.profiler.layer_timing import empty_piece
from bapipe.torch.profiler.measurement import (
    Environment,
    MeasuredLayer,
    Measurement,
    OptimizerTiming,
    Reading,
    Repeats,
    SizeMemory,
    UnitTiming,
    WholeStep,
)
from bapipe.torch.profiler.statistics import SampleSummary
from bapipe.torch.profiler.whole_step import steps_left
from measured_models import residual

CPU = torch.device("cpu")


def exactly(seconds: float) -> SampleSummary:
    return SampleSummary(median=seconds, low=seconds, high=seconds, count=5)


def on_gpu(host: float, device: float | None) -> Reading:
    return Reading(host=exactly(host), device=None if device is None else exactly(device))


def measured(
    *, device: tuple[float | None, ...], issue: tuple[float, ...] | None, alone: float = 9.0, eager: float = 20.0
) -> Measurement:
    """Layers whose forward and backward take the device and the host alike; an empty one takes the host 1 s."""
    count = len(device)
    timings = [
        UnitTiming(
            first=index,
            last=index,
            microbatch=8,
            round=round_,
            forward=on_gpu(alone + 1, own),
            backward=on_gpu(alone + 1, own),
            input_gradient=None,
        )
        for round_ in (0, 1)
        for index, own in enumerate(device)
    ]
    row = tuple(exactly(own + 1) for own in issue or ())
    step = WholeStep(
        microbatch=8, round=0, chain=exactly(eager), eager=exactly(eager), issue_forward=row, issue_backward=row
    )
    zeros = (0.0,) * count
    return Measurement(
        model="m",
        fingerprint="f",
        shapes=(),
        dtype="fp32",
        optimizer="sgd",
        environment=Environment(device="cuda", name="a GPU", torch="2", threads=1),
        layers=tuple(MeasuredLayer(name=str(index), parameters=1, weight_bytes=4.0) for index in range(count)),
        input_bytes=4.0,
        state_bytes=4.0,
        gradient_bytes=4.0,
        units=tuple((index, index) for index in range(count)),
        shares_forward=(1.0,) * count,
        shares_backward=(1.0,) * count,
        empty_forward=on_gpu(1.0, 0.0),
        empty_backward=on_gpu(1.0, 0.0),
        empty_issue_forward=exactly(1.0),
        empty_issue_backward=exactly(1.0),
        timings=tuple(timings),
        memory=(
            SizeMemory(
                microbatch=8,
                boundary_forward=zeros,
                boundary_backward=zeros,
                saved_activations=zeros,
                workspace=zeros,
            ),
        ),
        whole=(step,),
    )


def test_the_step_that_is_timed_computes_the_model_s_gradients() -> None:
    torch.manual_seed(0)
    module, args, kwargs = residual()
    chain = chain_of(module, args, kwargs, device=CPU, precision=find_precision("fp32"))
    pieces = [chain.piece(index, index) for index in range(len(chain.layers))]
    assert len(pieces) >= 3
    leaves, call = chain.inputs(3)
    step = StepIssue(pieces, leaves)
    torch.manual_seed(1)
    step()
    found = {name: parameter.grad for name, parameter in module.named_parameters()}
    module.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    torch.autograd.backward(tensors_of(call(leaves)), step.errors)
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(found[name], parameter.grad)
    step()
    forward, backward = step.summaries()
    assert [item.count for item in (*forward, *backward)] == [2] * 2 * len(pieces)
    assert all(item.median > 0 for item in (*forward, *backward))


def test_an_empty_layer_is_issued_in_some_time() -> None:
    forward, backward = empty_issue(*empty_piece(CPU, torch.float32))
    assert 0 < forward.low <= forward.median <= forward.high
    assert backward.median > 0


def test_where_the_host_limits_the_step_its_times_in_a_step_count() -> None:
    host = measured(device=(1.0, 1.0), issue=(4.0, 6.0))
    times = layer_times(host, 8)
    assert times.forward == pytest.approx((4.0, 6.0))
    assert times.backward == pytest.approx((4.0, 6.0))
    found = agreement(host, 8)
    assert found is not None
    assert found.residual == pytest.approx(0.0)
    made = parts(host, 8)
    assert made is not None
    assert (made.device, made.issue, made.alone, made.layers_alone) == pytest.approx((4.0, 20.0, 36.0, 36.0))


def test_where_the_device_limits_the_step_the_host_counts_until_it_is_ahead() -> None:
    times = layer_times(measured(device=(10.0, 10.0), issue=(2.0, 3.0)), 8)
    assert times.forward == pytest.approx((10.0, 10.0))
    assert times.backward == pytest.approx((10.0, 10.0))


def test_of_layers_that_repeat_each_other_the_start_of_the_step_counts_once() -> None:
    """Of the two that are measured the first is issued late, and the device waits for it; not so within a step."""
    short = measured(device=(10.0, 10.0), issue=(12.0, 2.0))
    assert layer_times(short, 8).forward == pytest.approx((12.0, 10.0))
    model = dataclasses.replace(
        short,
        repeats=Repeats(layers=short.layers[:1] * 5, timed_as=((0, 1),) * 5, weighed_as=(0, 1, 1, 1, 1)),
    )
    times = model_times(model, 8)
    assert times.forward == times.backward == pytest.approx((10.0,) * 5)
    found, made = agreement(model, 8), parts(model, 8)
    assert found is not None
    assert made is not None
    assert found.layers == made.device == pytest.approx(100.0)
    assert made.issue == pytest.approx(70.0)


@pytest.mark.parametrize(("together", "forward"), [(5.0, (2.0, 3.0)), (50.0, (4.0, 6.0))])
def test_layers_are_issued_in_no_more_time_than_the_stage_of_all(
    together: float, forward: tuple[float, float]
) -> None:
    """A layer alone computes masks and positions again; a host that waits for the device is no slower by it."""
    found = measured(device=(1.0, 1.0), issue=(4.0, 6.0))
    step = dataclasses.replace(found.whole[0], issue_together=(exactly(together), exactly(together)))
    times = layer_times(dataclasses.replace(found, whole=(step,)), 8)
    assert times.forward == times.backward == pytest.approx(forward)


def test_an_optimizer_step_takes_the_device_what_it_takes_beyond_a_single_number() -> None:
    found = measured(device=(1.0, 1.0), issue=(4.0, 6.0))
    readings = {None: on_gpu(4.0, 0.5), 0: on_gpu(4.0, 3.5), 1: on_gpu(4.0, 6.5)}
    steps = [OptimizerTiming(layer=layer, round=0, reading=own) for layer, own in readings.items()]
    model = dataclasses.replace(found, optimizer_steps=tuple(steps))
    (table,) = to_profile(model, accelerator="gpu", model=ModelRef(name="m")).accelerators.values()
    assert table.update == pytest.approx((3.0 + 2.0, 6.0 + 2.0))


@pytest.mark.parametrize("change", ["not taken", "no empty layer"])
def test_without_times_in_a_step_those_of_layers_alone_count(change: str) -> None:
    found = measured(device=(1.0, 1.0), issue=None if change == "not taken" else (4.0, 6.0))
    if change == "no empty layer":
        found = dataclasses.replace(found, empty_issue_forward=None)
    assert layer_times(found, 8).forward == pytest.approx((9.0, 9.0))
    made = parts(found, 8)
    assert made is not None
    assert made.issue is None


def test_a_layer_that_waits_for_the_device_keeps_its_own_time() -> None:
    found = measured(device=(1.0, None), issue=(4.0, 6.0))
    assert layer_times(found, 8).forward == pytest.approx((4.0, 9.0))
    assert parts(found, 8) is None


def test_the_middle_step_of_three_counts() -> None:
    found = measured(device=(1.0,), issue=(4.0,))
    steps = [dataclasses.replace(found.whole[0], eager=exactly(own)) for own in (10.0, 16.0, 10.2)]
    step = dataclasses.replace(found, whole=tuple(steps)).step(8)
    assert step is not None
    assert (step.median, step.low, step.high, step.count) == (10.2, 10.0, 16.0, 15)


@pytest.mark.parametrize(
    ("times", "round_", "long", "expected"),
    [
        ([], 0, False, 2),
        ([(0, 0.1)], 0, False, 1),
        ([(0, 0.1), (0, 0.2)], 0, False, 0),
        ([(0, 0.1), (0, 0.1)], 1, False, 2),
        ([], 0, True, 1),
        ([(0, 1.0)], 0, True, 0),
        ([(0, 1.0)], 1, True, 1),
        ([(0, 1.0), (1, 1.04)], 1, True, 0),
        ([(0, 1.0), (1, 1.3)], 1, True, 1),
        ([(0, 1.0), (1, 1.3), (1, 1.1)], 1, True, 0),
    ],
)
def test_how_often_the_whole_step_is_timed(
    times: list[tuple[int, float]], round_: int, long: bool, expected: int
) -> None:
    assert steps_left(times, round_, long=long) == expected
