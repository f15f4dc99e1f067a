"""Plans tried on real ranks: what they took, what failed, and a plan from a model in one call."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="running is torch's: pip install bapipe[torch]")

from bapipe.cli import cli  # noqa: E402
from bapipe.costs.profile import read_profile  # noqa: E402
from bapipe.costs.profile_ways import has_both_ways, of_way  # noqa: E402
from bapipe.errors import BaPipeError  # noqa: E402
from bapipe.hardware.cluster_file import read_cluster  # noqa: E402
from bapipe.planner import Request, explore, make_plan  # noqa: E402
from bapipe.records.plan import Plan, read_plan  # noqa: E402
from bapipe.torch.launch.run_options import RunOptions  # noqa: E402
from bapipe.torch.trials.auto import auto  # noqa: E402
from bapipe.torch.trials.auto_options import AutoOptions  # noqa: E402
from bapipe.torch.trials.plan_race import race  # noqa: E402

pytestmark = pytest.mark.usefixtures("warm")

MODEL = """
import torch
from torch import nn

class Steps(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(4)])

    def forward(self, x, labels):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return {"loss": nn.functional.mse_loss(x, labels), "output": x}

def build():
    return Steps(), {"x": torch.rand(4, 16), "labels": torch.rand(4, 16)}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model that returns its loss, and what `auto` made of it."""
    place: Path = tmp_path_factory.mktemp("auto")
    (place / "stepping.py").write_text(MODEL)
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setenv("BAPIPE_CACHE", str(place / "cache"))
        patch.setattr(sys, "path", list(sys.path))
        options = AutoOptions(folder=place / "out", global_batch=16, micro_batches=(2, 4), ranks=2, racing=2)
        found = auto("stepping:build", options, say=said.append)
        (place / "said").write_text("\n".join(said))
        assert found.plan == read_plan(place / "out" / "plan.json")
        if found.raced is not None:
            assert found.raced.best.plan.stages[0].layers == found.plan.stages[0].layers
            assert found.plan.prediction.time == found.raced.best.seconds
        again: list[str] = []
        auto("stepping:build", replace(options, racing=1), say=again.append)
        assert any("has the layers' costs already" in line for line in again)
    return place


def planned(folder: Path, **request: object) -> Plan:
    found = explore(
        read_profile(folder / "out" / "profile.json"),
        read_cluster(str(folder / "out" / "cluster.toml")),
        Request(global_batch=16, microbatch=4, **request),  # type: ignore[arg-type]
    )
    return make_plan(found)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("", "the model's output holds no scalar to train on; give a loss_fn"),
        (
            "def loss(output, target): return output.mean()",
            "has a loss function but no targets for it; add make_batch",
        ),
    ],
)
def test_what_cannot_be_trained_is_refused_before_layers_are_timed(
    code: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"untrainable{len(code)}"
    model = "from torch import nn, rand\ndef build(): return nn.Sequential(nn.Linear(4, 4)), (rand(4, 4),)\n"
    (tmp_path / f"{name}.py").write_text(f"{model}{code}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    options = AutoOptions(folder=tmp_path / "out", global_batch=16, micro_batches=(2, 4), ranks=2, device="cpu")
    timed: list[str] = []
    with pytest.raises(BaPipeError, match=message):
        auto(f"{name}:build", options, say=lambda _: None, progress=lambda what, _: timed.append(what))
    assert timed == []


def test_auto_leaves_all_files_and_the_commands_that_made_them(folder: Path) -> None:
    names = {path.name for path in (folder / "out").iterdir()}
    assert names >= {"cluster.toml", "profile.json", "profile-in-run.json", "cluster-in-run.toml", "plan.json"}
    lines = [shlex.split(line) for line in (folder / "out" / "commands.sh").read_text().splitlines()]
    assert [line[1] for line in lines] == ["cluster", "profile", "calibrate", "plan"]
    for words in lines:
        command = cli.get_command(None, words[1])  # type: ignore[arg-type]
        rest = words[2:]
        if words[1] == "cluster":
            command, rest = command.get_command(None, rest[0]), rest[1:]  # type: ignore[union-attr, arg-type]
        command.make_context(words[1], rest)  # type: ignore[union-attr]
    corrected = read_profile(folder / "out" / "profile-in-run.json")
    assert "recalibrated by run" in corrected.table("cpu-core").description
    assert read_cluster(str(folder / "out" / "cluster-in-run.toml")).collective_bandwidth is not None


def test_a_plan_that_fails_does_not_end_the_race(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    good = planned(folder, schedule="1f1b-sno", stages=2)
    wrong = replace(good, model=replace(good.model, fingerprint="0" * 16))
    found = race([wrong, good], RunOptions(), code=folder)
    assert found.best.plan is good
    assert [len(trial.records) for trial in found.trials] == [2, 0]
    assert found.best.seconds is not None
    assert found.best.seconds > 0
    assert "builds a model with fingerprint" in (found.trials[1].failure or "")


@pytest.mark.slow
def test_auto_measures_races_and_keeps_either_way(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    said: list[str] = []
    options = AutoOptions(
        folder=folder / "both",
        global_batch=16,
        micro_batches=(4,),
        ranks=2,
        device="cpu",
        racing=3,
        compiled="auto",
    )
    found = auto("stepping:build", options, say=said.append)
    profile, corrected = (read_profile(folder / "both" / f"profile{name}.json") for name in ("", "-in-run"))
    assert has_both_ways(profile)
    assert has_both_ways(corrected)
    for compiled in (False, True):
        assert "recalibrated by run" in of_way(corrected, compiled=compiled).table("cpu-core").description
    assert found.plan == read_plan(folder / "both" / "plan.json")
    assert found.plan.profile_hash == of_way(corrected, compiled=found.plan.compiled).hash
    assert any(note.startswith("stages run ") for note in found.plan.notes)
    assert "--compile auto" in (folder / "both" / "commands.sh").read_text()
    again: list[str] = []
    auto("stepping:build", replace(options, racing=1), say=again.append)
    assert any("has the layers' costs already" in line for line in again)
