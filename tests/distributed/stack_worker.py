"""The examples of training stacks on two ranks, and the same training in one process.

Usage: stack_worker.py FOLDER. The folder holds plans, and cases.json: a list of [example, arguments]. Every
example runs three times: in full, up to the middle, and on from there.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from forked_ranks import run_cases

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

STEPS, HALF = 20, 10


def main(folder: Path) -> int:
    torch.set_num_threads(1)
    cases: list[tuple[str, list[str]]] = json.loads((folder / "cases.json").read_text())
    modules = {name: importlib.import_module(name) for name, _ in cases}  # once, before the ranks are forked
    ways = [("full", []), ("half", ["--stop", str(HALF)]), ("half", ["--resume"])]
    jobs = [(name, options, place, extra) for name, options in cases for place, extra in ways]

    def run(index: int) -> Any:
        name, options, place, extra = jobs[index]
        import torch.distributed as dist

        os.environ.update({"RANK": str(dist.get_rank()), "LOCAL_RANK": str(dist.get_rank())})
        os.environ.update({"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"})
        out = folder / f"{name}-{'-'.join(options[1:])}-{place}"
        return modules[name].main([*options, "--out", str(out), "--steps", str(STEPS), *extra])

    return run_cases(folder, [2] * len(jobs), run)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
