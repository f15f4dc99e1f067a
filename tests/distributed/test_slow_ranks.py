"""A rank that becomes many times slower while it trains: it is named, and with --elastic-speed planned for."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="running a plan needs torch: pip install bapipe[torch]")

from checkpoint_plans import Leg, cut_plan  # noqa: E402
from elastic_runs import ENVIRONMENT, PROFILE, run, states  # noqa: E402

from bapipe.costs.profile import read_profile, write_profile  # noqa: E402
from bapipe.costs.profile_ways import join_ways  # noqa: E402
from bapipe.models.layers import ModelRef  # noqa: E402
from bapipe.records.plan import Plan, read_plan, write_plan  # noqa: E402
from bapipe.schedule.generators import make_schedule, with_update  # noqa: E402
from bapipe.torch.health.stragglers import WINDOW  # noqa: E402
from bapipe.torch.launch.elastic import plan_slowed  # noqa: E402

FIRST = 2 + WINDOW
"""step from which rank 1 is slow: the first that is judged against its past"""
STEPS = FIRST + 2 * WINDOW


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With a plan of two equal stages on two ranks, and the profile that it could be from."""
    monkeypatch.setitem(ENVIRONMENT, "PYTHONPATH", f"{Path(__file__).parent}:{ENVIRONMENT['PYTHONPATH']}")
    profile = read_profile(PROFILE)
    (table,) = profile.accelerators.values()
    even = tuple(tuple(1e-3 for _ in row) for row in table.forward)
    table = replace(table, forward=even, backward=even, weight_gradient=None)
    write_profile(replace(profile, accelerators={"cpu-core": table}), tmp_path / "profile.json")
    write_plan(_plan(), tmp_path / "plan.json")
    return tmp_path


def _plan() -> Plan:
    names = [*(f"layer{index}" for index in range(7)), "head"]
    leg = Leg(name="slow", schedule=with_update(make_schedule("1f1b-so", 2, 4)), cuts=(("layer3", None),))
    plan = cut_plan(leg, names, [None] * 8, size=8, fingerprint="")
    model = ModelRef(name="slow", ref="slowing_model:build", args={"rank": 1, "first": FIRST})
    return replace(plan, model=model, dtype="fp32", optimizer="sgd")


def test_a_rank_that_becomes_slow_is_named_while_it_trains(folder: Path) -> None:
    done = run(folder / "plan.json", "--steps", str(STEPS), "--json")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    (slow,) = (row["straggler"] for row in rows if "straggler" in row)
    assert (slow["rank"], slow["against"], slow["step"]) == (1, "past", FIRST + WINDOW - 1)
    assert slow["factor"] > 3
    assert slow["lost"] > slow["throughput"], "a step takes several times as long as before"


@pytest.mark.slow
def test_an_elastic_run_gives_a_slow_rank_less(folder: Path) -> None:
    """The slow rank is left with few layers, and the losses are those of a run under the first plan."""
    saving = ("--checkpoint", str(folder / "saved"), "--every", "1000", "--elastic-speed")
    done = run(folder / "plan.json", "--steps", str(STEPS), *saving, "--profile", str(folder / "profile.json"))
    assert done.returncode == 0, done.stderr
    assert re.search(
        r"^bapipe: rank 1 has become slow: in steps 10 to 17 .*; the run ends after 18 steps", done.stderr
    )
    after = read_plan(folder / "saved" / "plan-speed-1.json")
    layers = {name: len(stage.layers) for stage in after.stages for name in stage.accelerators}
    assert layers.get("localhost/1", 0) <= 2 < layers["localhost/0"]
    assert re.search(
        r"^localhost/1 takes \d+\.\dx as long as before; planned again on ", done.stdout, re.MULTILINE
    )
    assert f"goes on from {folder}/saved/step-00000018" in done.stdout
    assert [int(step) for step in re.findall(r"^step (\d+) ", done.stdout, re.MULTILINE)] == list(range(STEPS))
    assert states(folder / "saved")


def test_a_plan_for_another_speed_is_taken_only_if_it_is_faster(folder: Path) -> None:
    profile = read_profile(folder / "profile.json")
    costs, after = plan_slowed(_plan(), profile, "localhost/1", 4.0)
    assert after is not None
    assert {item.name: item.type for item in after.cluster.accelerators} == {
        "localhost/0": "cpu-core",
        "localhost/1": "slow-4.00x-cpu-core",
    }
    assert plan_slowed(after, costs, "localhost/1", 1.01)[1] is None


@pytest.mark.parametrize("compiled", [True, False])
def test_a_plan_for_another_speed_runs_compiled_if_the_one_before_did(compiled: bool, folder: Path) -> None:
    profile = read_profile(folder / "profile.json")
    both, plan = join_ways(profile, replace(profile, compiled=True)), replace(_plan(), compiled=compiled)
    _, after = plan_slowed(plan, both, "localhost/1", 4.0)
    assert after is not None
    assert after.compiled == compiled
