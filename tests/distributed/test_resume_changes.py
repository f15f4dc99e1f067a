"""A resume compares the training with what was saved: structure, optimizer, precision and settings."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="running a plan needs torch: pip install bapipe[torch]")

from checkpoint_plans import Leg, cut_plan  # noqa: E402
from elastic_runs import run, states  # noqa: E402
from made_checkpoints import signed  # noqa: E402
from resumed_model import build, loss, make_batch  # noqa: E402

from bapipe.errors import BaPipeError  # noqa: E402
from bapipe.models.layers import ModelRef  # noqa: E402
from bapipe.records.plan import Plan, write_plan  # noqa: E402
from bapipe.schedule.generators import make_schedule, with_update  # noqa: E402
from bapipe.torch.capturing import capture  # noqa: E402
from bapipe.torch.checkpoint.checkpoint_manifest import MANIFEST, TRAINING  # noqa: E402
from bapipe.torch.checkpoint.checkpoints import Checkpoints  # noqa: E402
from bapipe.torch.inputs.make_optimizer import make_optimizer  # noqa: E402
from bapipe.torch.runtime.pipeline import Pipeline  # noqa: E402

LAYERS = ("0", "1", "2", "3")
STEP = "step-00000001"


def plan_of(stages: int = 1, *, precision: str = "fp32", optimizer: str = "adam", **args: Any) -> Plan:
    cuts = (("1", None),) if stages == 2 else ()
    leg = Leg(name="any", schedule=with_update(make_schedule("1f1b-so", stages, 2)), cuts=cuts)
    plan = cut_plan(leg, LAYERS, [None] * len(LAYERS), size=4, fingerprint="")
    model = ModelRef(name="resumed", ref="resumed_model:build", args=args)
    return replace(plan, model=model, dtype=precision, optimizer=optimizer)


class Trained:
    """A training in this process alone."""

    def __init__(self, plan: Plan, folder: Path, *, rate: float = 0.01, seed: int = 0, **settings: Any) -> None:
        torch.manual_seed(seed)
        module, args = build(**plan.model.args)
        dtype = {"bf16": torch.bfloat16}.get(plan.dtype, torch.float32)
        captured = capture(module.to(dtype), (args[0].to(dtype),), check=False)
        self.pipe = Pipeline(captured, plan, loss, seed=seed)
        self.optimizer = make_optimizer(plan.optimizer, list(self.pipe.parameters()), rate=rate)
        assert self.optimizer is not None
        self.said: list[str] = []
        self.checkpoints = Checkpoints(
            self.pipe, folder, optimizer=self.optimizer, say=self.said.append, settings=settings
        )

    def step(self) -> None:
        inputs, target = make_batch(self.pipe.steps, 8)
        dtype = next(self.pipe.parameters()).dtype
        self.pipe.step(inputs.to(dtype), target)
        assert self.optimizer is not None
        self.optimizer.step()
        self.optimizer.zero_grad()

    def close(self) -> None:
        self.checkpoints.close()
        self.pipe.close()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = tmp_path_factory.mktemp("store") / "store"
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def original(alone: None, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: ARG001
    """A folder with a checkpoint of one step."""
    folder = tmp_path_factory.mktemp("saved")
    training = Trained(plan_of(), folder, data="a")
    training.step()
    training.checkpoints.save()
    training.close()
    return folder


@pytest.fixture
def saved(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "saved"))


@contextlib.contextmanager
def training(plan: Plan, folder: Path, **options: Any) -> Iterator[Trained]:
    made = Trained(plan, folder, **options)
    try:
        yield made
    finally:
        made.close()


def test_the_same_training_goes_on_without_a_word(saved: Path) -> None:
    with training(plan_of(), saved, data="a") as again:
        assert again.checkpoints.load() is not None
        assert again.said == []


@pytest.mark.parametrize(
    "changes, what",
    [
        ({"activation": "ReLU"}, "structure: '0.1' computed aten.tanh and computes aten.relu"),
        ({"dropout": 0.5}, "structure: '2.1' computed aten.dropout(p=0.0, train=True) and computes "),
        ({"factor": 2.0}, "structure: '1.1.factors', which is in no checkpoint, has other values"),
        ({"optimizer": "sgd"}, "optimizer: it was torch.optim.adam.Adam and is torch.optim.sgd.SGD"),
        ({"precision": "bf16"}, "precision: it was fp32 and is bf16"),
        ({"precision": "bf16-mixed"}, "precision: it was fp32 and is bf16-mixed"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_another_training_is_refused_and_accepted(saved: Path, changes: dict[str, Any], what: str) -> None:
    kind = what.partition(":")[0]
    with training(plan_of(**changes), saved, data="a") as other:
        with pytest.raises(BaPipeError) as caught:
            other.checkpoints.load()
        assert str(caught.value).startswith(f"{saved}/{STEP} is of another training: {what}")
        assert f"--accept-changes {kind} to go on" in str(caught.value)
        assert other.pipe.steps == 0
        assert other.checkpoints.load(accept_changes=[kind]) is not None
        assert [line.partition(": ")[0] for line in other.said] == [
            f"{saved}/{STEP} is of another training, as accepted"
        ]
        wanted = states(saved)
        for name, parameter in other.pipe.named_parameters():
            assert torch.equal(parameter, wanted[name].to(parameter.dtype))
        other.step()
        assert all(parameter.isfinite().all() for parameter in other.pipe.parameters())


def test_an_optimizer_that_begins_anew_steps_the_weights_that_were_loaded(saved: Path) -> None:
    """Also where it keeps copies of them."""
    plan = plan_of(precision="bf16", optimizer="sgd(master_weights=true)")
    with training(plan, saved, rate=0.0) as other:
        other.checkpoints.load(accept_changes=["optimizer", "precision"])
        loaded = [parameter.detach().clone() for parameter in other.pipe.parameters()]
        assert torch.equal(loaded[0], states(saved)["0.0.weight"].bfloat16())
        other.step()
        assert all(map(torch.equal, loaded, other.pipe.parameters()))


def test_settings_are_said_in_one_line_and_the_saved_rate_goes_on(saved: Path) -> None:
    with training(plan_of(), saved, rate=0.5, seed=3, data="b") as other:
        assert other.checkpoints.load() is not None
        assert other.said == [
            f"{saved}/{STEP} goes on with other settings: learning rate was 0.01 and stays so, not 0.5 "
            "(--accept-changes learning-rate takes 0.5); seed was 0 and is 3; data was a and is b"
        ]
        assert [group["lr"] for group in other.optimizer.param_groups] == [0.01]
        other.step()
        other.checkpoints.save()
    with training(plan_of(), saved, rate=0.01, seed=3, data="b") as again:
        again.checkpoints.load()
        assert again.said == []


def test_an_accepted_rate_is_used_and_recorded(saved: Path) -> None:
    with training(plan_of(), saved, rate=0.5, data="a") as other:
        other.checkpoints.load(accept_changes=["learning-rate"])
        assert [group["lr"] for group in other.optimizer.param_groups] == [0.5]
        assert len(other.optimizer.state) == len(list(other.pipe.parameters()))
        other.step()
        other.checkpoints.save()
    with training(plan_of(), saved, rate=0.5, data="a") as again:
        again.checkpoints.load()
        assert again.said == []


def test_a_checkpoint_without_a_record_loads_and_says_so(saved: Path) -> None:
    """As earlier versions wrote them."""
    manifest = json.loads((saved / STEP / MANIFEST).read_text())
    del manifest["files"][TRAINING]
    signed(saved / STEP, manifest)
    (saved / STEP / TRAINING).unlink()
    with training(plan_of(activation="ReLU"), saved) as other:
        assert other.checkpoints.load() is not None
        [line] = other.said
        assert line.startswith(f"{saved}/{STEP} was saved before checkpoints recorded structure, optimizer, ")


def test_a_record_of_a_newer_schema_is_refused_and_not_passed_over(saved: Path) -> None:
    file = saved / STEP / TRAINING
    file.write_text(file.read_text().replace("bapipe.training/1", "bapipe.training/9"))
    signed(saved / STEP)
    with training(plan_of(), saved) as other:
        with pytest.raises(
            BaPipeError, match=r"has schema 'bapipe\.training/9', expected .*; use the version that"
        ):
            other.checkpoints.load()
        assert other.said == []


def test_weights_of_another_structure_are_taken_with_a_word(saved: Path, caplog: pytest.LogCaptureFixture) -> None:
    """`Pipeline(checkpoint=…)` begins a training, so it refuses nothing that fits."""
    for activation, lines in {"Tanh": 0, "ReLU": 1}.items():
        module, args = build(activation=activation)
        captured = capture(module, args, check=False)
        caplog.clear()
        with Pipeline(captured, plan_of(activation=activation), loss, checkpoint=saved):
            pass
        assert len(caplog.messages) == lines
    assert caplog.messages == [
        f"{saved}/{STEP} is of a model of another structure: '0.1' computed aten.tanh and computes aten.relu"
    ]


def run_changed(saved: Path, folder: Path, *options: str, ranks: int) -> subprocess.CompletedProcess[str]:
    """`bapipe run` of another activation function, optimizer and seed."""
    shutil.copy(Path(__file__).with_name("resumed_model.py"), folder)
    write_plan(plan_of(ranks, activation="ReLU", optimizer="sgd"), folder / "plan.json")
    more = ("--checkpoint", str(saved), "--steps", "2", "--resume", "--seed", "4")
    return run(folder / "plan.json", *more, *options)


def test_a_run_of_two_ranks_is_refused_what_one_has_saved(saved: Path, tmp_path: Path) -> None:
    """And is not started again, as it would be refused again."""
    done = run_changed(saved, tmp_path, "--restarts", "1", ranks=2)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"bapipe: {saved}/{STEP} is of another training: structure: '0.1' computed aten.tanh and computes "
        "aten.relu; optimizer: it was torch.optim.adam.Adam and is torch.optim.sgd.SGD; give --accept-changes "
        "structure,optimizer to go on all the same (in Python: load(accept_changes=…)), or another checkpoint\n"
    )


@pytest.mark.slow
def test_a_run_says_what_is_accepted_and_what_else_differs(saved: Path, tmp_path: Path) -> None:
    done = run_changed(saved, tmp_path, "--accept-changes", "structure,optimizer", ranks=1)
    assert done.returncode == 0, done.stderr
    assert f"bapipe: {saved}/{STEP} is of another training, as accepted: structure: '0.1' " in done.stderr
    assert f"bapipe: {saved}/{STEP} goes on with other settings: seed was 0 and is 4\n" in done.stderr
