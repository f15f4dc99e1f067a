"""The script for torch.distributed.pipelining trains as a single process does."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bapipe import plan, write_plan
from bapipe.exporters.export_plan import export_plan
from bapipe.models.layers import ModelRef
from bapipe.records.plan import Plan
from command import bapipe
from made_profiles import made_cluster, made_profile
from paths import REPOSITORY

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.usefixtures("warm")

MODEL = '''
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.one = nn.LayerNorm(8), nn.Linear(8, 8)
        self.norm2, self.two = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, value):
        value = value + self.one(self.norm1(value)).tanh()
        return value + self.two(self.norm2(value)).tanh()


class Tied(nn.Module):
    """Its head is its embedding's table."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids):
        value = self.table(ids)
        for block in self.blocks:
            value = block(value)
        return self.head(value)


def build():
    return Tied().double()


def make_batch(seed, size):
    ids = torch.randint(16, (size, 4), generator=torch.Generator().manual_seed(seed))
    return ids[:, :3], ids[:, 3]


def loss(output, target):
    return nn.functional.cross_entropy(output[:, -1], target)
'''


def tied_plan() -> Plan:
    """Zero bubble on two ranks, cut inside of the second block; the last stage has the first one's weights."""
    made = plan(made_profile({"cpu-core": [1.0, 1.0]}), made_cluster({"cpu-core": 2}), global_batch=8,
                micro_batch=2, schedule="zb-h1", stages=2)  # fmt: skip
    halves = ("norm1", "one", ""), ("norm2", "two", "")
    names = [[f"blocks.{block}.{part}".rstrip(".") for part in half] for block in range(2) for half in halves]
    first = ("table", *names[0], *names[1], *names[2])
    return replace(
        made,
        model=ModelRef(name="tied", ref="tied_model:build"),
        stages=(
            replace(made.stages[0], modules=first),
            replace(made.stages[1], modules=(*names[3], "", "head"), tied=("table",)),
        ),
    )


def test_it_has_the_gradients_of_one_process(tmp_path: Path) -> None:
    (tmp_path / "tied_model.py").write_text(MODEL)
    write_plan(tied_plan(), tmp_path / "plan.json")
    made = bapipe("export", "plan.json", "--to", "torch", "-o", "train.py", "--strict", folder=tmp_path)
    assert made.returncode == 0, made.stderr
    assert '"0W' in (tmp_path / "train.py").read_text()
    done = trained(tmp_path, "train.py")
    found = compared(done.stdout)
    assert [rank for rank, *_ in found] == ["0", "1"], done.stdout
    assert all(weights == own and int(own) > 0 for _, weights, own, _ in found), done.stdout
    assert all(float(value) < 1e-12 for *_, value in found), done.stdout
    (losses,) = re.findall(r"losses by ([0-9.e+-]+)", done.stdout)
    assert float(losses) < 1e-12
    assert len(re.findall(r"^step \d  loss ", done.stdout, re.MULTILINE)) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "right, wrong",
    [
        ("        tied.sum()\n", ""),
        ("loss_fn=loss)", "loss_fn=loss, scale_grads=False)"),
        ("target=target.to(device)", "target=target.flip(0).to(device)"),
    ],
)
def test_its_check_sees_what_is_wrong(right: str, wrong: str, tmp_path: Path) -> None:
    """Tied gradients that are not summed, gradients of another scale, other targets."""
    text = export_plan(tied_plan(), "torch", out="train.py").files["train.py"]
    assert text.count(right) == 1
    (tmp_path / "tied_model.py").write_text(MODEL)
    (tmp_path / "train.py").write_text(text.replace(right, wrong))
    assert max(float(value) for *_, value in compared(trained(tmp_path, "train.py").stdout)) > 1e-3


def compared(output: str) -> list[tuple[str, str, str, str]]:
    """(rank, weights compared, weights, largest difference) of each rank."""
    said = r"rank (\d): gradients of (\d+) of (\d+) weights differ by at most ([0-9.e+-]+|inf)"
    return sorted(re.findall(said, output))


def trained(folder: Path, script: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", script]
    done = subprocess.run(
        [*command, "--steps", "2", "--check"], cwd=folder, capture_output=True, text=True, timeout=300,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY / "src")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done


def test_its_cuts_are_the_plans_own() -> None:
    text = export_plan(tied_plan(), "torch", out="t.py").files["t.py"]
    assert 'CUTS = [\n    "blocks.1.norm2"\n]' in text
    compile(text, "t.py", "exec")
