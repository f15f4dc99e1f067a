"""The commands of the nodes of a plan, and what a run shows."""

from __future__ import annotations

import io
import json
import shlex
import subprocess
import sys
from dataclasses import replace

import pytest

from bapipe.errors import BaPipeError, DeadlockError
from bapipe.records.plan import Plan, read_plan
from bapipe.records.plan_consistency import microbatch_sizes
from bapipe.records.run_record import StepRecord
from bapipe.schedule.generators import capped, make_schedule
from bapipe.schedule.schedule_file import ScheduleFile
from bapipe.torch.launch.display import Display
from bapipe.torch.launch.node_commands import node_commands, ranks_by_node, slurm_script
from bapipe.torch.runtime.plan_checks import check_plan
from paths import REPOSITORY

EXAMPLE = REPOSITORY / "examples" / "plan.json"


@pytest.fixture
def plan() -> Plan:
    return read_plan(EXAMPLE)


def _on_nodes(plan: Plan, *nodes: str) -> Plan:
    """The same plan with each stage's accelerator on the node of that name."""
    named = [
        replace(accelerator, name=f"{node}/0", node=node)
        for accelerator, node in zip(plan.cluster.accelerators, nodes, strict=True)
    ]
    stages = [
        replace(stage, accelerators=(accelerator.name,))
        for stage, accelerator in zip(plan.stages, named, strict=True)
    ]
    cluster = replace(plan.cluster, accelerators=tuple(named), between=plan.cluster.within)
    return replace(plan, cluster=cluster, stages=tuple(stages))


def test_each_node_has_its_command(plan: Plan) -> None:
    apart = _on_nodes(plan, "left", "right side")
    assert ranks_by_node(plan) == {"localhost": (0, 1)}
    assert ranks_by_node(apart) == {"left": (0,), "right side": (1,)}
    first, second = node_commands(apart, ["my train.py", "--lr", "0.1"], port=4000)
    assert first.line == (
        "BAPIPE_NODE=left torchrun --nnodes 2 --node-rank 0 --nproc-per-node 1 --master-addr left "
        "--master-port 4000 'my train.py' --lr 0.1"
    )
    assert shlex.split(second.line)[:5] == ["BAPIPE_NODE=right side", "torchrun", "--nnodes", "2", "--node-rank"]
    assert "--master-addr left" in second.line
    assert node_commands(apart, ["x.py"], head="10.0.0.1")[1].command[-3:] == ("--master-port", "29500", "x.py")


def test_the_slurm_script_is_one_that_bash_reads(plan: Plan) -> None:
    odd = replace(plan, model=replace(plan.model, name="a\n#SBATCH b'c"))
    script = slurm_script(_on_nodes(odd, "a b", "it's"), ["train.py", "two words", "it's"])
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0
    assert "#SBATCH --job-name=bapipe-a-SBATCH-b-c\n#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=1\n" in script


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _shown(plan: Plan, stream: io.StringIO, *, steps: int = 2, as_json: bool = False) -> str:
    display = Display(replace(plan, global_batch=64), steps, as_json=as_json, stream=stream)
    for step in range(steps):
        display.step(StepRecord(step=step, loss=2.5, seconds=plan.prediction.time * 2), 0.25)
    display.say("wrote run.json", wrote="run.json")
    display.close()
    return stream.getvalue()


def test_a_line_is_shown_per_step(plan: Plan) -> None:
    first, second, wrote = _shown(plan, io.StringIO()).splitlines()
    assert first.startswith("step 0  loss 2.500000  ")
    assert first.endswith(f"{32 / plan.prediction.time:.1f} samples/s  bubble 25.0%  2.00x predicted")
    assert second.startswith("step 1  loss 2.5")
    assert wrote == "wrote run.json"


def test_on_a_terminal_a_line_is_rewritten_and_twenty_stay(plan: Plan) -> None:
    shown = _shown(plan, Terminal(), steps=100)
    assert shown.count("\n") == 22
    assert shown.count("\r\x1b[2K") == 100
    assert "predicted  [2/100]\r" in shown
    assert shown.endswith("predicted\nwrote run.json\n")


def test_what_goes_on_before_the_first_step_is_shown_on_a_terminal_only(plan: Plan) -> None:
    for stream, shown in (
        (Terminal(), "\r\x1b[2Kcapturing the model …\nwrote run.json\n"),
        (io.StringIO(), "wrote run.json\n"),
    ):
        display = Display(plan, 1, stream=stream)
        display.progress("capturing the model")
        display.say("wrote run.json")
        assert stream.getvalue() == shown


def test_a_step_that_is_not_traced_has_no_bubble(plan: Plan) -> None:
    stream = io.StringIO()
    Display(plan, 1, stream=stream).step(StepRecord(step=0, loss=2.5, seconds=1.0), None)
    assert " samples/s  " in stream.getvalue()
    assert "bubble" not in stream.getvalue()
    stream = io.StringIO()
    Display(plan, 1, stream=stream, as_json=True).step(StepRecord(step=0, loss=2.5, seconds=1.0), None)
    assert json.loads(stream.getvalue())["bubble"] is None


def test_json_has_an_object_per_line_and_no_nan(plan: Plan) -> None:
    stream = io.StringIO()
    display = Display(plan, 1, as_json=True, stream=stream)
    display.step(StepRecord(step=0, loss=float("nan"), seconds=0.5), 0.1)
    display.say("", wrote="run.json")
    step, wrote = (json.loads(line) for line in stream.getvalue().splitlines())
    assert step["loss"] is None
    assert step["samples_per_second"] == plan.global_batch / 0.5
    assert step["bubble"] == 0.1
    assert wrote == {"wrote": "run.json"}


def test_a_schedule_that_cannot_be_run_is_refused(plan: Plan) -> None:
    schedule = make_schedule("fbp-as", len(plan.stages), plan.microbatches)
    with pytest.raises(BaPipeError, match="rank 0 computes on 2 lanes at once"):
        check_plan(replace(plan, schedule=ScheduleFile.of(schedule)))


def test_an_order_that_waits_for_ever_is_refused_before_it_starts(plan: Plan) -> None:
    schedule = capped(2, plan.microbatches, [1, 2])
    with pytest.raises(DeadlockError, match="waits for ever"):
        check_plan(replace(plan, schedule=ScheduleFile.of(schedule)))


def test_micro_batches_must_hold_the_global_batch(plan: Plan) -> None:
    count, size = plan.microbatches, plan.microbatch_size
    assert sum(microbatch_sizes(plan)) == plan.global_batch
    for samples in (count * size - size, count * size + 1):
        with pytest.raises(BaPipeError, match=f"cannot hold a global batch of {samples} samples; plan again"):
            microbatch_sizes(replace(plan, global_batch=samples))


def test_the_display_needs_no_torch() -> None:
    code = "import sys, bapipe.torch.launch.display; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
