"""The engine that a `Pipeline` holds: its phases, its trace, and that nobody reaches into another class."""

from __future__ import annotations

import ast
import logging

import pytest

torch = pytest.importorskip("torch", reason="running a plan needs torch: pip install bapipe[torch]")

from torch.nn import functional  # noqa: E402

from bapipe.torch.runtime.pipeline import Pipeline  # noqa: E402
from bapipe.torch.stage.loss import LossSum, LossTotals  # noqa: E402
from one_rank_plan import build, one_rank  # noqa: E402
from paths import REPOSITORY  # noqa: E402

SOURCE = REPOSITORY / "src" / "bapipe" / "torch"


def gradients(*, trace: bool) -> tuple[float, list[torch.Tensor], Pipeline]:
    torch.manual_seed(1)
    inputs, targets = torch.rand(8, 6).double(), torch.rand(8, 4).double()
    with Pipeline(build, one_rank(), functional.mse_loss, trace=trace) as pipe:
        loss = pipe.step(inputs, targets)
    return loss, [parameter.grad for parameter in pipe.parameters() if parameter.grad is not None], pipe


@pytest.mark.usefixtures("alone")
def test_without_a_trace_nothing_is_timed_and_the_gradients_are_the_same() -> None:
    loss, found, traced = gradients(trace=True)
    assert traced.trace is not None
    assert [action for action, _, _ in traced.trace.events] == ["0F0", "0F1", "0B0", "0B1"]
    again, untimed, pipe = gradients(trace=False)
    assert pipe.trace is None
    assert pipe.peak_in_flight == traced.peak_in_flight == {0: 2}
    assert again == loss
    assert len(untimed) == len(found) == 4
    assert all(torch.equal(mine, other) for mine, other in zip(untimed, found, strict=True))


@pytest.mark.usefixtures("alone")
def test_each_phase_is_logged_before_it_begins(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="bapipe"), Pipeline(build, one_rank(), functional.mse_loss):
        pass
    assert [record.getMessage() for record in caplog.records] == [
        "rank 0 is capturing the model",
        "rank 0 is building stage 0 on cpu",
        "rank 0 is connecting to 0 other ranks",
        "rank 0 is ready: tensors cross by gloo: the ranks are CPUs",
    ]
    assert {record.name.partition(".")[0] for record in caplog.records} == {"bapipe"}


@pytest.mark.usefixtures("alone")
def test_waiting_for_the_device_counts_as_waiting_for_the_other_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of NCCL may keep the device busy for as long as another rank is stopped, and reading the loss or a
    norm waits for the device: only what is within a meeting is noticed to take too long."""
    at: list[str] = []
    with Pipeline(build, one_rank(), functional.mse_loss) as pipe:
        read, to_host = LossSum.sums, torch.Tensor.cpu

        def sums(own: LossSum) -> LossTotals:
            at.append(pipe.watch.progress.current[0])
            return read(own)

        def cpu(own: torch.Tensor) -> torch.Tensor:
            at.append(pipe.watch.progress.current[0])
            return to_host(own)

        monkeypatch.setattr(LossSum, "sums", sums)
        pipe.step(torch.rand(8, 6).double(), torch.rand(8, 4).double())
        monkeypatch.setattr(torch.Tensor, "cpu", cpu)
        pipe.clip_grad_norm_(1.0)
    assert at == ["summing the loss, step 0", "clipping gradients, step 0"]


def test_no_class_uses_a_private_attribute_of_another() -> None:
    """`_init_weights` is what modules of transformers have in place of `reset_parameters`; `_rebuild_buckets` is
    torch's own (`bucket_gradients.py`)."""
    for path in [file for folder in ("runtime", "pipedream", "launch") for file in (SOURCE / folder).glob("*.py")]:
        found = [
            f"{path.name}:{node.lineno}: {ast.unparse(node)}"
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.Attribute)
            and node.attr.startswith("_")
            and not node.attr.startswith("__")
            and ast.unparse(node.value) not in ("self", "os")
            and node.attr not in ("_init_weights", "_rebuild_buckets")
        ]
        assert found == []


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("norm", [torch.nn.BatchNorm1d, torch.nn.InstanceNorm1d])
def test_norms_without_running_statistics_use_each_microbatchs_in_evaluation(norm: type[torch.nn.Module]) -> None:
    def normed() -> tuple[torch.nn.Module, tuple[torch.Tensor], dict[str, object]]:
        torch.manual_seed(2)
        layers = (torch.nn.Linear(6, 5), norm(2, track_running_stats=False), torch.nn.Linear(5, 4))
        return torch.nn.Sequential(*layers).double(), (torch.rand(4, 2, 6).double(),), {}

    inputs, targets = torch.rand(8, 2, 6).double(), torch.rand(8, 2, 4).double()
    with Pipeline(normed, one_rank(), functional.mse_loss) as pipe:
        found = pipe.evaluate(inputs, targets)
    module = normed()[0].eval()
    with torch.no_grad():
        outputs = torch.cat([module(part) for part in inputs.split(4)])
        expected = float(functional.mse_loss(outputs, targets))
    assert found == pytest.approx(expected, rel=1e-12)
