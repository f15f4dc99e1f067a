"""Ranks that train a small GPT by pipelines and count the bytes of their tensors. Usage: … FOLDER.

The folder has a plan for each schedule; every case leaves the most that a rank held.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from forked_ranks import run_cases

from bapipe.records.plan import read_plan
from bapipe.torch.launch.run_options import RunOptions
from bapipe.torch.launch.train import Training
from bapipe.torch.runtime.plan_checks import trusted_plan
from counted_bytes import CountedBytes

SCHEDULES = ("1f1b", "zb", "zb-v")
WORLD, STEPS = 2, 2
MODEL = {"blocks": 6, "width": 64, "heads": 4, "vocabulary": 128, "sequence": 64, "dropout": 0.0}


def train(name: str, folder: Path) -> dict[str, Any]:
    training = Training(trusted_plan(read_plan(folder / f"{name}.json")), RunOptions(steps=STEPS))
    counted = CountedBytes(training.pipe.parameters())
    with counted:
        for step in range(STEPS):
            training.step(training.batches(step))
    training.close()
    return {"most": counted.most}


def main(folder: Path) -> int:
    torch.set_num_threads(1)
    return run_cases(folder, [WORLD] * len(SCHEDULES), lambda index: train(SCHEDULES[index], folder))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
