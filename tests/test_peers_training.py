"""benchmarks/peers_training: every model builds, every row's name becomes a command, and rows become a summary."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from bapipe.costs.profile import write_profile
from bapipe.models.model_spec import model_ref, parse_arguments
from bapipe.records.plan import Alternative, read_plan
from bapipe.torch.inputs.build_model import build_model
from command import bapipe
from loaded_files import load_file
from made_profiles import made_profile
from paths import REPOSITORY

FOLDER = REPOSITORY / "benchmarks" / "peers_training"


@pytest.fixture(scope="module", autouse=True)
def beside() -> Iterator[None]:
    """Modules of the benchmark import each other by name, which others have, too."""
    names = ("models", "contenders", "side_by_side", "summary", "work", "model")
    before = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    folders = [str(FOLDER), str(REPOSITORY / "benchmarks" / "tinyllama")]
    sys.path[:0] = folders
    yield
    for folder in folders:
        sys.path.remove(folder)
    for name in names:
        sys.modules.pop(name, None)
    sys.modules.update(before)


@pytest.fixture(scope="module")
def driver() -> ModuleType:
    return load_file(FOLDER / "run.py", "peers_training_run")


@pytest.fixture(scope="module")
def contenders(driver: ModuleType) -> ModuleType:
    assert driver
    return sys.modules["contenders"]


def test_every_model_has_a_small_stand_in_that_returns_its_loss(driver: ModuleType) -> None:
    for name, about in driver.MODELS.items():
        given = parse_arguments([f"{key}={value}" for key, value in about.given(tiny=True).items()])
        built = build_model(model_ref(about.spec, given), folders=[FOLDER], precision="fp32")
        found = built.module(*built.args, **built.kwargs)
        loss = found if isinstance(found, Tensor) else found["loss"]
        assert loss.ndim == 0, name
        assert torch.isfinite(loss), name
        assert loss.requires_grad, name


def test_of_the_model_with_adapters_little_is_trained(driver: ModuleType) -> None:
    """Of TinyLlama's shape 0.2 %; what is frozen takes part in the loss all the same."""
    about = driver.MODELS["tinyllama-lora"]
    built = build_model(model_ref(about.spec, {"tiny": True, "sequence": 4, "rank": 1}), folders=[FOLDER])
    trained = {name for name, own in built.module.named_parameters() if own.requires_grad}
    assert trained
    assert all(name.endswith((".up", ".down")) for name in trained)


def test_every_name_is_that_of_a_row(contenders: ModuleType) -> None:
    names = contenders.row_names()
    assert len(set(names)) == len(names)
    for name in names:
        setting, contender = contenders.parse_row(name)
        assert setting in contenders.SETTINGS
        assert name == f"{setting.name} {contenders_words(contenders, contender)}"
    for wrong in (
        "",
        "vit-l",
        "vit-l bf16 compiled 5 torch ddp",
        "vit-l bf16 compiled 4 torch",
        "x bf16 eager 4 torch ddp",
    ):
        with pytest.raises(ValueError, match="is no row"):
            contenders.parse_row(wrong)


def contenders_words(contenders: ModuleType, contender: Any) -> str:
    return next(words for words, own in contenders.CONTENDERS.items() if own is contender)


def test_the_next_families_are_the_fastest_of_other_kinds_that_fit(contenders: ModuleType) -> None:
    def other(name: str, time: float | None) -> Alternative:
        return Alternative(name=name, time=time, memory_bytes=1.0, reason="")

    listed = [
        other("zb-h1, 4 stages, micro-batch 4", 1.0),
        other("interleaved, 4 accelerators with 2 stages each, micro-batch 4", 1.3),
        other("1f1b-so, 4 stages, micro-batch 4", None),
        other("data parallelism, 4 accumulation steps, micro-batch 4", 1.2),
        other("tensor slicing (by formula)", 0.1),
        other("1f1b-sno, 4 stages, micro-batch 4", 1.5),
        other("1f1b, 4 stages, micro-batch 4", 1.4),
    ]
    assert contenders.other_families("zb", listed) == ["data-parallel", "interleaved", "1f1b"]


def measured(driver: ModuleType, folder: Path, broken: str = "") -> Any:
    """Rows whose launches are not run but answered: a peer takes twice as long as ours, a broken one fails."""
    launched: list[tuple[str, list[str]]] = []

    class Answered(driver.Rows):  # type: ignore[name-defined, misc]
        def bapipe(self, *words: str) -> None:
            done = bapipe(*words)
            assert done.returncode == 0, done.stderr

        def cluster(self, transport: str, name: str = "cluster") -> Path:
            path = self.folder / f"{name}-{transport}.toml"
            path.write_text(CLUSTER)
            return Path(path)

        def run(self, *command: str, **_: float) -> None:
            asked = json.loads(Path(command[-1]).read_text())
            if Path(command[-2]).name == "measure_model.py":
                made = made_profile({"cpu-core": [1.0] * 8}, weights=[1e6] * 8, boundary=[1e3] * 8)
                write_profile(made, asked["out"])
                return
            launched.append((Path(command[-2]).name, [job["row"] for job in asked["jobs"]]))
            for job in asked["jobs"]:
                out = Path(job["out"])
                if broken and job["row"].endswith(broken):
                    out.with_suffix(".failed").write_text("rank 0: out of memory")
                    raise RuntimeError("exit 1")
                seconds = 1.0 if job["kind"] == "ours" else 2.0
                out.write_text(
                    json.dumps({"seconds": [9.0, 9.0, *[seconds] * 3], "losses": [1.0], "memory": [1, 1]})
                )

    work = Answered(folder, tiny=True, budget=100.0, words="gnmt-8 fp32 eager unequal")
    assert work.run_all(until="rows", repeats=1)
    return work, launched


CLUSTER = """schema = "bapipe.cluster/1"
name = "two"

[[accelerators]]
type = "cpu-core"
count = 2
node = "two"

[links.within]
bandwidth = 1e9
latency = 1e-5
"""


@pytest.fixture(scope="module")
def ran(driver: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[tuple[str, list[str]]]]:
    """A folder with all plans and rows of a setting, and what was launched for it."""
    folder: Path = tmp_path_factory.mktemp("rows")
    _, launched = measured(driver, folder)
    return folder, launched


def test_rows_are_planned_launched_together_and_compared(
    driver: ModuleType, ran: tuple[Path, list[tuple[str, list[str]]]]
) -> None:
    folder, launched = ran
    setting = "gnmt-8 fp32 eager unequal"
    assert [program for program, _ in launched] == ["our_trials.py", "peer_ranks.py", "our_trials.py"]
    assert launched[0][1][0] == f"{setting} ours nccl"
    assert launched[2][1] == [f"{setting} ours auto"]
    assert len(launched[1][1]) == 8
    result = json.loads((folder / "result.json").read_text())
    (compared,) = result["settings"]
    assert compared["ratio"] == pytest.approx(2.0)
    assert compared["automatic_fastest"]
    errors = {row["contender"]: row["error"] for row in result["rows"] if "error" in row}
    assert errors.pop("deepspeed") == "deepspeed is not installed"
    assert errors == {}
    kind = compared["kind"]
    mean = result["summary"]["others_least" if kind == "data-parallel" else "pipeline_geometric_mean"]
    assert mean == pytest.approx(2.0)
    claim = next(row for row in result["rows"] if row["contender"] == "ours nccl")
    assert claim["samples_per_second"] == pytest.approx(16.0)
    assert claim["time_error"] == pytest.approx(16 / claim["predicted"] - 1)
    equal = read_plan(folder / f"plan-{setting.replace(' ', '-')}-1f1b-so-nccl-equal.json")
    assert [(stage.first_layer, stage.last_layer) for stage in equal.stages] == [(0, 3), (4, 7)]
    assert not launched[3:]
    again = driver.Rows(folder, tiny=True, budget=100.0, words=setting)
    assert again.run_all(until="rows", repeats=1), "nothing is left, so that nothing is started"


def test_a_peer_that_fails_after_others_is_tried_by_itself(
    driver: ModuleType, ran: tuple[Path, list[tuple[str, list[str]]]], tmp_path: Path
) -> None:
    for path in [path for word in ("profile", "cluster", "plan") for path in ran[0].glob(f"{word}-*")]:
        shutil.copy(path, tmp_path)
    work, launched = measured(driver, tmp_path, broken="zbv ourcut")
    peers = [rows for program, rows in launched if program == "peer_ranks.py"]
    assert peers[1] == ["gnmt-8 fp32 eager unequal torch zbv ourcut"]
    assert work.rows[peers[1][0]]["error"] == "rank 0: out of memory"
    assert len(peers) == 3
    assert set(peers[2]) | set(peers[1]) == set(peers[0]) - set(peers[0][: peers[0].index(peers[1][0])])
    ran = [row for row in peers[0] if row != peers[1][0]]
    assert all(len(work.rows[row]["runs"]) == 1 for row in ran)


def test_slices_are_cut_as_a_setting_says(contenders: ModuleType) -> None:
    setting = next(own for own in contenders.SETTINGS if own.slices == "unequal")
    assert setting.cut.percentages == (25.0, 25.0, 12.5, 12.5)
    assert replace(setting, slices="8").cut.percentages == (12.5,) * 8


def test_a_turn_is_one_processs_at_a_time_and_ends_with_it(driver: ModuleType, tmp_path: Path) -> None:
    assert driver
    turns = load_file(FOLDER / "turns.py", "peers_training_turns")
    path = tmp_path / "turn"
    holder = (
        f"import sys; sys.path.insert(0, {str(FOLDER)!r}); from turns import Turn; Turn({str(path)!r}).take(); "
    )
    with subprocess.Popen(
        [sys.executable, "-c", holder + "print('held', flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        own, taken = turns.Turn(path), threading.Event()
        waiting = threading.Thread(target=lambda: (own.take(), taken.set()))
        waiting.start()
        assert not taken.wait(0.3)
        other.kill()
    waiting.join(timeout=30)
    assert taken.is_set()
    own.take()  # which changes nothing for who has it
    own.leave()
    turns.Turn(None).take()


def test_settings_beside_each_other_leave_their_rows_together(
    driver: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    side_by_side = sys.modules["side_by_side"]
    told: list[str] = []

    def begin(work: Any, setting: Any, rows: list[str], **_: Any) -> subprocess.Popen[bytes]:
        told.append(setting.name)
        folder = work.folder / setting.stem
        folder.mkdir()
        text = json.dumps({row: {"error": "not run here"} for row in rows})
        write = f"import pathlib; pathlib.Path({str(folder / 'rows.json')!r}).write_text({text!r})"
        return subprocess.Popen([sys.executable, "-c", write])

    monkeypatch.setattr(side_by_side, "_begin", begin)
    work = driver.Rows(tmp_path, tiny=True, budget=1000.0, words="vgg16 fp32 eager 4,gnmt-8 fp32 eager unequal")
    monkeypatch.setattr(work, "cluster_of", lambda *_: None)
    assert driver.run_beside(work, 2, until="rows", repeats=1)
    assert sorted(told) == ["gnmt-8 fp32 eager unequal", "vgg16 fp32 eager 4"]
    assert {row.rpartition(" fp32 ")[0] for row in json.loads((tmp_path / "rows.json").read_text())} == {
        "gnmt-8",
        "vgg16",
    }
