"""`bapipe plan` as a user starts it: answers, files, and one clear line for every mistake."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bapipe.costs.profile import write_profile
from bapipe.records.plan import read_plan
from command import bapipe, refused
from made_profiles import made_profile
from paths import REPOSITORY

EXAMPLES = REPOSITORY / "examples"


def test_json_has_what_other_programs_need() -> None:
    done = bapipe("plan", "gnmt-8", "--cluster", "4xv100", "--stages", "4", "--schedule", "1f1b-so", "--json",
                  "--global-batch", "256", "--dataset-size", "10000")  # fmt: skip
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert plan["kind"] == "pipeline"
    assert plan["schedule"] == "1f1b-so"
    assert plan["global_batch"] == plan["microbatch_size"] * plan["microbatches"] == 256
    assert len(plan["stages"]) == 4
    assert plan["stages"][0]["first_layer"] == 0
    for stage in plan["stages"]:
        assert stage["memory_bytes"] <= stage["memory_capacity"]
        assert stage["forward"] > 0
        assert stage["backward"] > 0
    assert plan["time"] >= plan["lower_bound"]
    assert plan["gap"] == pytest.approx(plan["time"] / plan["lower_bound"] - 1)
    assert plan["throughput"] == pytest.approx(256 / plan["time"])
    assert plan["epoch_time"] == pytest.approx(10000 / plan["throughput"])
    assert all(
        {"name", "time", "memory_bytes", "reason"} <= set(alternative) for alternative in plan["alternatives"]
    )
    assert any("analytic" in note for note in plan["notes"])


@pytest.mark.parametrize(
    ("model", "count", "bandwidth", "kind", "schedule"),
    [
        ("resnet50", 4, "1.60GB/s", "data-parallel", "data-parallel"),
        ("resnet50", 8, "0.65GB/s", "data-parallel", "data-parallel"),
        ("gnmt-8", 4, "1.60GB/s", "pipeline", "1f1b-so"),
        ("gnmt-8", 8, "0.65GB/s", "pipeline", "1f1b-so"),
    ],
)
def test_the_papers_choices_in_the_papers_space(
    model: str, count: int, bandwidth: str, kind: str, schedule: str
) -> None:
    done = bapipe("plan", model, "--cluster", f"{count}xv100", "--link-bandwidth", bandwidth, "--space", "paper",
                  "--json")  # fmt: skip
    plan = json.loads(done.stdout)
    assert (plan["kind"], plan["schedule"]) == (kind, schedule)


def test_the_terminal_shows_stages_rivals_and_the_timeline(tmp_path: Path) -> None:
    done = bapipe("plan", "vgg16", "--cluster", "2xv100", "--explain", "--out", "plan.json", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    for expected in (
        "why not the others",
        "step by step",
        "inter-layer",
        "equation 1",
        "rank 0",
        "wrote plan.json",
    ):
        assert expected in done.stdout
    assert read_plan(tmp_path / "plan.json").model.name == "vgg16"


def test_compare_shows_every_strategy() -> None:
    done = bapipe("plan", "vgg16", "--cluster", "2xv100", "--compare", "--json")
    rows = json.loads(done.stdout)["strategies"]
    assert [row["strategy"] for row in rows] == [
        "exact", "bapipe", "uniform", "parameters", "time", "pipedream", "gpipe", "dp", "ddp", "fsdp",
    ]  # fmt: skip
    best = min(row["time"] for row in rows)
    assert rows[0]["time"] == pytest.approx(best)


def test_the_same_command_writes_the_same_bytes(tmp_path: Path) -> None:
    for name in ("one.json", "two.json"):
        assert bapipe("plan", "vgg16", "--cluster", "2xv100", "--out", name, folder=tmp_path).returncode == 0
    assert (tmp_path / "one.json").read_bytes() == (tmp_path / "two.json").read_bytes()


def test_planning_does_not_import_torch() -> None:
    code = (
        "import sys; sys.argv = ['bapipe', 'plan', 'vgg16', '--cluster', '2xv100', '--json']\n"
        "from bapipe.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


MISTAKES = [
    (("vgg61", "--cluster", "4xv100"), "did you mean 'vgg16'"),
    (("vgg16", "--cluster", "4xv10"), "v100"),
    (("vgg16", "--cluster", "missing.toml"), "no file missing.toml"),
    (("vgg16", "--cluster", "4xv100", "--schedule", "1f1b-oo"), "did you mean '1f1b-so'"),
    (("vgg16", "--cluster", "4xv100", "--strategy", "exakt"), "did you mean 'exact'"),
    (("vgg16", "--cluster", "4xv100", "--stages", "5"), "the cluster has 4"),
    (("vgg16", "--cluster", "32xv100", "--stages", "32"), "vgg16 has 16; lower --stages"),
    (("vgg16", "--cluster", "4xv100", "--global-batch", "0"), "--global-batch must be at least 1"),
    (("vgg16", "--cluster", "4xv100", "--global-batch", "100", "--micro-batch", "64"), "no multiple"),
    (("vgg16", "--cluster", "4xv100", "--link-bandwidth", "0GB/s"), "must be more than 0"),
    (("vgg16", "--cluster", "4xv100", "--link-bandwidth", "fast"), "must look like"),
    (("vgg16", "--cluster", "4xv100", "--memory-limit", "10MB"), "nothing fits"),
    (("vgg16", "--cluster", "4xv100", "--dtype", "fp12"), "fp12"),
    (("vgg16", "--cluster", "4xv100", "--schedule", "fbp-as"), "does not suit"),
    (("vgg16", "--cluster", "4xv100", "--dataset-size", "-1"), "--dataset-size must be at least 1"),
    (("vgg16",), "--cluster"),
]


@pytest.mark.parametrize(("arguments", "text"), MISTAKES, ids=[" ".join(case[0]) for case in MISTAKES])
def test_a_mistake_is_one_clear_line(arguments: tuple[str, ...], text: str, tmp_path: Path) -> None:
    assert text in refused("plan", *arguments, "--out", "plan.json", folder=tmp_path)
    assert not (tmp_path / "plan.json").exists()


def broken_profiles() -> dict[str, tuple[str, str]]:
    def text(**changes: object) -> str:
        values = json.loads(json.dumps(VALID))
        for path, value in changes.items():
            target, *keys = values, *path.split("__")
            for key in keys[:-1]:
                target = target[key]
            if value is None:
                del target[keys[-1]]
            else:
                target[keys[-1]] = value
        return json.dumps(values)

    return {
        "truncated": (text()[:-200], "not valid JSON"),
        "nan": (text().replace("0.5", "NaN"), "NaN"),
        "wrong-version": (text(schema="bapipe.profile/9"), "expected 'bapipe.profile/1'"),
        "another-file": (text(schema="bapipe.plan/1"), "it is a plan, give a profile here"),
        "missing-cost": (text(accelerators__x__forward=None), "'forward' is missing"),
        "short-row": (text(accelerators__x__forward=[[0.5]] * 2), "1 values for 2 layers"),
        "negative-bytes": (text(accelerators__x__saved_activations=[[-1.0, 1.0]] * 2), "-1 for layer"),
        "misspelt": (text().replace('"backward"', '"bakward"'), "did you mean 'backward'"),
        "no-layers": (text(layers=[]), "has no layers"),
    }


VALID: dict[str, object] = {
    "schema": "bapipe.profile/1",
    "model": {"name": "two"},
    "dtype": "fp32",
    "layers": [{"name": name, "parameters": 1, "weight_bytes": 4.0} for name in ("a", "b")],
    "accelerators": {
        "x": {
            "source": "hand-written",
            "description": "made",
            "microbatches": [1, 2],
            "forward": [[0.5, 0.5], [1.0, 1.0]],
            "backward": [[1.0, 1.0], [2.0, 2.0]],
            "boundary_forward": [[8.0, 0.0], [16.0, 0.0]],
            "boundary_backward": [[8.0, 0.0], [16.0, 0.0]],
            "saved_activations": [[1.0, 1.0], [2.0, 2.0]],
            "update": [0.0, 0.0],
        }
    },
}  # fmt: skip


@pytest.mark.parametrize("case", list(broken_profiles()))
def test_a_broken_profile_is_refused_and_nothing_is_overwritten(case: str, tmp_path: Path) -> None:
    content, text = broken_profiles()[case]
    (tmp_path / "profile.json").write_text(content)
    (tmp_path / "plan.json").write_text("kept")
    line = refused("plan", "profile.json", "--cluster", "2xv100", "--out", "plan.json", folder=tmp_path)
    assert text in line
    assert (tmp_path / "plan.json").read_text() == "kept"


def test_a_profile_without_the_clusters_accelerator_says_what_it_has(tmp_path: Path) -> None:
    write_profile(made_profile({"cpu-core": [1.0, 1.0]}), tmp_path / "profile.json")
    line = refused("plan", "profile.json", "--cluster", "2xv100", folder=tmp_path)
    assert "no costs for 'v100-16'" in line
    assert "it has cpu-core" in line


def test_a_link_without_bandwidth_is_refused(tmp_path: Path) -> None:
    text = (EXAMPLES / "cluster-4-v100.toml").read_text()
    broken = "\n".join(line for line in text.splitlines() if not line.strip().startswith("bandwidth"))
    (tmp_path / "cluster.toml").write_text(broken)
    assert "bandwidth" in refused("plan", "vgg16", "--cluster", "cluster.toml", folder=tmp_path)


@pytest.mark.parametrize("count", [2, 4])
def test_a_small_plan_tells_that_none_is_faster(count: int, tmp_path: Path) -> None:
    write_profile(made_profile({"v100-16": [1.0, 4.0, 1.0, 1.0, 2.0]}), tmp_path / "profile.json")
    done = bapipe("plan", "profile.json", "--cluster", f"{count}xv100", "--stages", str(count), "--json",
                  "--global-batch", "16", folder=tmp_path)  # fmt: skip
    notes = json.loads(done.stdout)["notes"]
    assert any("all were simulated or ruled out" in note for note in notes)


def test_a_measured_profile_has_its_own_dtype(tmp_path: Path) -> None:
    text = (REPOSITORY / "examples" / "tiny-profile.json").read_text(encoding="utf-8")
    (tmp_path / "profile.json").write_text(text.replace('"fp32"', '"bf16"'), encoding="utf-8")
    options = ("profile.json", "--cluster", str(REPOSITORY / "examples" / "cluster-two-cpus.toml"))
    made = bapipe("plan", *options, "--global-batch", "64", "--out", "plan.json", folder=tmp_path)
    assert made.returncode == 0, made.stderr
    assert read_plan(tmp_path / "plan.json").dtype == "bf16"
    assert "is of bf16, asked for fp32" in refused("plan", *options, "--dtype", "fp32", folder=tmp_path)
