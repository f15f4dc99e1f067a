"""Training stacks over a plan train as one process does, resumed or not: each example as a user starts it."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="running a plan needs torch: pip install bapipe[torch]")
pytest.importorskip("transformers", reason="needs transformers: pip install bapipe[dev]")

from forked_ranks import read_results, start  # noqa: E402

from paths import REPOSITORY  # noqa: E402
from tiny_gpt2_plan import tiny_gpt2, tiny_gpt2_plan  # noqa: E402

HERE = Path(__file__).resolve().parent
STEPS, HALF = 20, 10
LOOPS = {"train_accelerate": "accelerate", "train_fabric": "lightning_fabric", "train_lora": "peft"}
"""examples of loops, and the package that each needs"""
NUMBERS = {"float64": 1e-9, "float32": 1e-5}
EACH = [pytest.param(name, marks=() if name == "float64" else pytest.mark.slow) for name in NUMBERS]
Results = dict[tuple[str, str], list[list[Any]]]
"""(example, numbers) -> in full, up to the middle, on from there -> what each rank returned"""


def _there(package: str) -> bool:
    other = {"lightning_fabric": "lightning"}.get(package, package)
    return importlib.util.find_spec(package) is not None or importlib.util.find_spec(other) is not None


def _cases(selected: list[str]) -> list[tuple[str, str]]:
    loops = [name for name, package in LOOPS.items() if _there(package)]
    found = [(name, numbers) for name in loops for numbers in selected]
    if "train_accelerate" in loops:
        found += [("train_trainer", numbers) for numbers in selected]
    return found


@pytest.fixture(scope="module")
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Results]:
    folder = tmp_path_factory.mktemp("stacks")
    own = [
        item for item in request.session.items if isinstance(item, pytest.Function) and item.path == request.path
    ]
    asked = {item.callspec.params.get("numbers") for item in own if hasattr(item, "callspec")}
    selected = [numbers for numbers in NUMBERS if numbers in asked]
    for numbers in selected:
        tiny_gpt2_plan(folder / f"{numbers}.json", float64=numbers == "float64")
        tiny_gpt2_plan(folder / f"lora-{numbers}.json", float64=numbers == "float64", adapters=True)
    cases = []
    for name, numbers in _cases(selected):
        options = [str(folder / f"{'lora-' if name == 'train_lora' else ''}{numbers}.json")]
        options += ["--float64"] if numbers == "float64" else []
        options += ["--sgd"] if name == "train_trainer" and numbers == "float32" else []
        cases.append((name, options))
    (folder / "cases.json").write_text(json.dumps(cases))
    start(HERE / "stack_worker.py", folder, seconds=900)
    results = read_results(folder, [2] * (3 * len(cases)))
    return folder, {case: results[3 * index : 3 * index + 3] for index, case in enumerate(_cases(selected))}


def _alone(*, float64: bool, adapters: bool = False) -> list[float]:
    """The examples' loop on the whole model."""
    module, _, _ = tiny_gpt2().build(float64=float64, adapters=adapters)
    data = tiny_gpt2().Sentences(64).tokens
    trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trainable, lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    losses: list[float] = []
    while len(losses) < STEPS:
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(len(losses) // 8))
        for rows in order.split(8):
            loss = module(input_ids=data[rows], labels=data[rows]).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trainable, 0.5)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            losses.append(float(loss.detach()))
    return losses[:STEPS]


def _same(losses: list[float], expected: list[float], numbers: str) -> None:
    """Twenty losses, all of them different, each that of one process."""
    assert len(losses) == len(set(expected)) == STEPS
    for step, (loss, wanted) in enumerate(zip(losses, expected, strict=True)):
        assert math.isclose(loss, wanted, rel_tol=NUMBERS[numbers]), step


@pytest.mark.parametrize("numbers", EACH)
@pytest.mark.parametrize("name", LOOPS)
def test_loops_train_as_one_process(trained: tuple[Path, Results], name: str, numbers: str) -> None:
    if not _there(LOOPS[name]):
        pytest.skip(f"needs {LOOPS[name]}: pip install {LOOPS[name].replace('_', '-')}")
    expected = _alone(float64=numbers == "float64", adapters=name == "train_lora")
    full, half, rest = trained[1][name, numbers]
    for rank, found in enumerate((*full, *half, *rest)):
        assert "error" not in found, f"{rank}: {found['error']}"
    assert full[0] == full[1]
    assert (len(half[0]), len(rest[0])) == (HALF, STEPS - HALF)
    for losses in (full[0], [*half[0], *rest[0]]):
        _same(losses, expected, numbers)


def _logged(history: list[dict[str, float]]) -> list[float]:
    """The training loss of every step."""
    return [entry["loss"] for entry in history if "loss" in entry]


def _trainer_alone(folder: Path, *, float64: bool) -> tuple[dict[str, float], dict[str, Any], list[float]]:
    """The example's arguments under the Trainer itself: metrics, weights and the losses of all steps."""
    from transformers import Trainer, TrainingArguments

    sys.path.insert(0, str(REPOSITORY / "examples"))
    import train_trainer

    arguments = TrainingArguments(
        str(folder), max_steps=STEPS, per_device_train_batch_size=8, per_device_eval_batch_size=8,
        learning_rate=1e-2, optim="adamw_torch" if float64 else "sgd", weight_decay=0.1,
        lr_scheduler_type="cosine", warmup_steps=2, max_grad_norm=0.5, logging_steps=1, save_strategy="no",
        use_cpu=True, dataloader_pin_memory=False, disable_tqdm=True, report_to="none",
    )  # fmt: skip
    trainer = Trainer(
        tiny_gpt2().make_model(float64=float64),
        arguments,
        train_dataset=tiny_gpt2().Sentences(64),
        eval_dataset=tiny_gpt2().Sentences(12, seed=1),
        compute_metrics=train_trainer.accuracy,
    )
    trainer.train()
    return trainer.evaluate(), trainer.model.state_dict(), _logged(trainer.state.log_history)


@pytest.mark.parametrize("numbers", EACH)
def test_the_trainer_trains_as_the_trainer(trained: tuple[Path, Results], tmp_path: Path, numbers: str) -> None:
    if not _there("accelerate"):
        pytest.skip("needs accelerate: pip install accelerate")
    from safetensors.torch import load_file

    folder, results = trained
    metrics, weights, losses = _trainer_alone(tmp_path, float64=numbers == "float64")
    full, half, rest = results["train_trainer", numbers]
    for rank, found in enumerate((*full, *half, *rest)):
        assert "error" not in found, f"{rank}: {found['error']}"
    places = sorted(folder.glob(f"train_trainer-*{'float64' if numbers == 'float64' else 'sgd'}-*"))
    assert [place.name.rpartition("-")[2] for place in places] == ["full", "half"]
    for ranks, place in zip((full, rest), places, strict=True):
        for found in ranks:
            assert math.isclose(found["eval_loss"], metrics["eval_loss"], rel_tol=NUMBERS[numbers])
            assert found["eval_accuracy"] == metrics["eval_accuracy"]
        saved = load_file(place / "model.safetensors")
        for name, expected in weights.items():
            assert torch.allclose(saved[name], expected, rtol=NUMBERS[numbers], atol=NUMBERS[numbers]), name
        state = json.loads((place / f"checkpoint-{STEPS}" / "trainer_state.json").read_text())
        assert state["global_step"] == STEPS
        _same(_logged(state["log_history"]), losses, numbers)
        assert state["is_world_process_zero"]


def test_what_is_not_for_a_pipeline_is_refused(tmp_path: Path) -> None:
    if not _there("accelerate"):
        pytest.skip("needs accelerate: pip install accelerate")
    from transformers import TrainingArguments

    from bapipe.errors import BaPipeError
    from bapipe.torch.integrations.pipeline_trainer import PipelineArguments, PipelineTrainer

    with pytest.raises(BaPipeError, match="bf16 is not for a pipeline; leave it out, and plan with --precision"):
        PipelineArguments(str(tmp_path), bf16=True)
    with pytest.raises(BaPipeError, match="plan a larger --global-batch"):
        PipelineArguments(str(tmp_path), gradient_accumulation_steps=2)
    with pytest.raises(BaPipeError, match="load_best_model_at_end is not for a pipeline"):
        PipelineArguments(str(tmp_path), load_best_model_at_end=True, eval_strategy="epoch", save_strategy="epoch")
    model = tiny_gpt2().make_model()
    with pytest.raises(BaPipeError, match="give PipelineArguments"):
        PipelineTrainer(model, "plan.json", args=TrainingArguments(str(tmp_path), use_cpu=True, report_to="none"))
    with pytest.raises(BaPipeError, match="give train_dataset or example"):
        PipelineTrainer(model, "plan.json", args=PipelineArguments(str(tmp_path), report_to="none"))
