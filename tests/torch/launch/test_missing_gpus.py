"""A run that needs a GPU where torch has none is refused in one line, before any rank starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from paths import REPOSITORY

torch = pytest.importorskip("torch", reason="running a plan needs torch: pip install bapipe[torch]")

from bapipe.cli.run import run_command  # noqa: E402
from bapipe.errors import BaPipeError  # noqa: E402
from bapipe.records.plan import Plan, read_plan, write_plan  # noqa: E402
from bapipe.torch.checkpoint.checkpoint_options import Saving  # noqa: E402
from bapipe.torch.launch import worker  # noqa: E402
from bapipe.torch.launch.elastic import launch_elastic  # noqa: E402
from bapipe.torch.launch.launcher import check_gpus, launch  # noqa: E402
from bapipe.torch.launch.run_options import RunOptions  # noqa: E402
from bapipe.torch.runtime.plan_checks import describe_need, missing_gpus, ranks_on_gpus  # noqa: E402

pytestmark = pytest.mark.usefixtures("warm")

EXAMPLES = REPOSITORY / "examples"
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="torch has a GPU here, so nothing is missing")


def on_gpus(ranks: int) -> Plan:
    """The example's plan with so many of its two ranks on GPUs."""
    plan = read_plan(EXAMPLES / "plan.json")
    cluster = plan.cluster
    known = next(iter(cluster.types.values()))
    types = {**cluster.types, "gpu-x": replace(known, name="gpu-x", kind="gpu")}
    members = tuple(
        replace(item, type="gpu-x") if plan.ranks.index(item.name) < ranks else item
        for item in cluster.accelerators
    )
    return replace(plan, cluster=replace(cluster, types=types, accelerators=members))


def test_who_needs_a_gpu() -> None:
    assert [ranks_on_gpus(on_gpus(count), None) for count in (0, 1, 2)] == [[], [0], [0, 1]]
    assert ranks_on_gpus(on_gpus(2), "cpu") == []
    assert ranks_on_gpus(on_gpus(0), "cuda") == [0, 1]
    assert describe_need(on_gpus(1), None) == "the plan has 1 of 2 ranks on GPUs (gpu-x)"
    assert str(missing_gpus("it needs one", "2.13", built=True)) == (
        "it needs one, but torch 2.13 here sees none; give --device cpu, or run it where GPUs are"
    )
    check_gpus(on_gpus(2), "cpu")


@no_gpu
def test_the_launcher_refuses_before_any_rank_starts(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_plan(on_gpus(1), tmp_path / "plan.json")
    out = tmp_path / "run.json"
    words = (
        r"the plan has 1 of 2 ranks on GPUs \(gpu-x\), but torch .* here (sees none|is built without CUDA); give"
    )
    with pytest.raises(BaPipeError, match=words):
        launch(tmp_path / "plan.json", RunOptions(out=out))
    saving = Saving(folder=tmp_path / "saved", every=1, keep=1, asynchronous=False, resume=False)
    with pytest.raises(BaPipeError, match=words):
        launch_elastic(
            tmp_path / "plan.json",
            RunOptions(steps=1, timeout=60.0, saving=saving),
            profile=EXAMPLES / "tiny-profile.json",
        )
    assert not out.exists()
    assert not saving.folder.exists()
    assert capfd.readouterr() == ("", "")


@no_gpu
def test_the_command_says_what_to_do() -> None:
    words = ["--device", "cuda", str(EXAMPLES / "plan.json")]
    with pytest.raises(BaPipeError, match=r"^--device cuda needs a GPU, but torch \S+ here .*; give --device cpu"):
        CliRunner().invoke(run_command, words, catch_exceptions=False)


@no_gpu
def test_a_rank_started_by_hand_says_so_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_plan(on_gpus(2), tmp_path / "plan.json")
    assert worker.main([str(tmp_path / "plan.json")]) == 2
    told = capsys.readouterr().err
    assert told.startswith("bapipe: the plan has 2 of 2 ranks on GPUs (gpu-x), but torch ")
    assert told.count("\n") == 1
