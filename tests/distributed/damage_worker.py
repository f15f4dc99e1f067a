"""Two ranks that load checkpoints which came to harm. Usage: damage_worker.py FOLDER, which has count.json.

Leaves FOLDER/result-0-<rank>.json: of every load what was done to the checkpoint and what came of it. Every second
load is of a folder whose last checkpoint came to harm and whose one before did not. Then a training goes on from
such a folder, FOLDER/onward, and is refused one where all came to harm, FOLDER/lost. Checkpoints stay in FOLDER/a.
"""

from __future__ import annotations

import ctypes
import json
import random
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from checkpoint_corruptions import KINDS, corrupt
from elastic_runs import ROOT, tiny_plan
from forked_ranks import run_cases

sys.path.insert(0, str(ROOT))

from examples.tiny_model import build, loss, make_batch

from bapipe.errors import BaPipeError
from bapipe.torch.capturing import Captured, capture
from bapipe.torch.checkpoint.checkpoint_survey import summarise, verify_files
from bapipe.torch.checkpoint.checkpoints import Checkpoints
from bapipe.torch.checkpoint.whole_model import CheckpointState
from bapipe.torch.runtime.pipeline import Pipeline

SIZE = {"hidden": 24, "layers": 6}


class Subject:
    """A small training, what it holds and what was saved of it."""

    def __init__(self, captured: Captured, folder: Path) -> None:
        plan = tiny_plan(2)
        self.folder, self.global_batch = folder, plan.global_batch
        self.pipe = Pipeline(captured, plan, loss, seed=None)
        self.optimizer = torch.optim.Adam(self.pipe.parameters())
        self.said: list[str] = []
        self.saved = {(run, step): self._trained(run, step) for run in ("a", "b") for step in (1, 2, 3)}

    def _trained(self, run: str, step: int) -> Any:
        """Train a step more, save it, and keep what it was."""
        if step == 1:
            torch.manual_seed(ord(run))
            with torch.no_grad():
                for parameter in self.pipe.parameters():
                    parameter.normal_(0, 0.1)
            self.optimizer = torch.optim.Adam(self.pipe.parameters())
            self.pipe.steps = 0
        inputs, target = make_batch(ord(run) + step, self.global_batch)
        self.pipe.step(inputs.float(), target)
        self.optimizer.step()
        self.optimizer.zero_grad()
        checkpoints = self.checkpoints(self.folder / run)
        checkpoints.save(data=[run, step])
        checkpoints.close()
        return self.state()

    def checkpoints(self, folder: Path) -> Checkpoints:
        return Checkpoints(self.pipe, folder, optimizer=self.optimizer, keep=3, say=self.said.append)

    def state(self) -> Any:
        parameters = {name: value.detach().clone() for name, value in self.pipe.named_parameters()}
        entries = [
            {key: value.clone() for key, value in self.optimizer.state[item].items()}
            for item in self.pipe.parameters()
        ]
        return self.pipe.steps, parameters, entries, float(torch.get_rng_state().double().sum())

    def forget(self) -> None:
        """What is here must not be taken for what was loaded."""
        with torch.no_grad():
            for parameter in self.pipe.parameters():
                parameter.fill_(float("nan"))
        self.optimizer.state.clear()
        self.pipe.steps = 99
        torch.manual_seed(99)


def same(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[name], second[name]) for name in first)
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(same, first, second))
    return bool(first == second)


def give_up_override() -> None:
    """Be refused files that may not be read, also as root: CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH go."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    sets = (ctypes.c_uint32 * 6)()
    if libc.capget(header, sets) == 0:
        for word in range(3):  # effective, permitted and inheritable, of the first 32
            sets[word] &= ~(1 << 1 | 1 << 2)
        libc.capset(header, sets)


def main(folder: Path) -> int:
    settings = json.loads((folder / "count.json").read_text())
    give_up_override()
    torch.manual_seed(0)
    module, args, kwargs = build(**SIZE)
    captured = capture(module, args, kwargs, check=False)
    return run_cases(folder, [2], lambda _: damage(folder, captured, **settings))


def damage(folder: Path, captured: Captured, *, count: int, seed: int) -> dict[str, Any]:
    subject = Subject(captured, folder)
    loads = _loads(folder, subject, count=count, seed=seed)
    return {"loads": loads, "onward": _onward(folder, subject), "lost": _lost(folder, subject)}


def _loads(folder: Path, subject: Subject, *, count: int, seed: int) -> list[dict[str, Any]]:
    chance = random.Random(seed)
    source = folder / "a" / "step-00000003"
    others = [folder / run / f"step-{step:08d}" for run, step in subject.saved if (run, step) != ("a", 3)]
    whole = dict(CheckpointState(source))
    work, kinds = folder / "work", list(KINDS)
    found = []
    for number in range(count):
        by_folder = number % 2 == 1
        what = ["", ""]
        if dist.get_rank() == 0:
            for path in (work / source.name, *(work / source.name).glob("*")):
                if path.exists() and not path.is_symlink():
                    path.chmod(0o700)
            shutil.rmtree(work, ignore_errors=True)
            shutil.copytree(source, work / source.name)
            if by_folder:
                shutil.copytree(source.with_name("step-00000002"), work / "step-00000002")
            kind = kinds[number // 2 % len(kinds)]
            what = [corrupt(chance, work / source.name, others, kind), kind]
        dist.broadcast_object_list(what, src=0)
        subject.forget()
        subject.said.clear()
        start = time.perf_counter()
        outcome, error = _outcome(subject, work if by_folder else work / source.name)
        seconds = time.perf_counter() - start
        export, verified = _alone(work / source.name, whole) if dist.get_rank() == 0 else ("", "")
        found.append(
            {
                "what": what[0],
                "kind": what[1],
                "outcome": outcome,
                "error": error,
                "export": export,
                "verified": verified,
                "said": list(subject.said),
                "seconds": seconds,
            }
        )
        dist.barrier()
    return found


def _flipped(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)


def _copied(subject: Subject, folder: Path, harmed: tuple[int, ...]) -> Checkpoints:
    """A copy of run a's checkpoints, of which rank 0 harms some, and what is to load them."""
    if dist.get_rank() == 0:
        shutil.copytree(subject.folder / "a", folder)
        for step in harmed:
            _flipped(folder / f"step-{step:08d}" / "__1_0.distcp")
    dist.barrier()
    subject.forget()
    subject.said.clear()
    return subject.checkpoints(folder)


def _onward(folder: Path, subject: Subject) -> dict[str, Any]:
    """Go on from the one before, to the step that came to harm."""
    checkpoints = _copied(subject, folder / "onward", (3,))
    loaded = checkpoints.load()
    inputs, target = make_batch(ord("a") + 3, subject.global_batch)
    subject.pipe.step(inputs.float(), target)
    subject.optimizer.step()
    subject.optimizer.zero_grad()
    checkpoints.save(data=["a", 3])
    checkpoints.close()
    as_before = same(subject.saved["a", 3], subject.state())
    return {"step": loaded and loaded.step, "same": as_before, "said": list(subject.said)}


def _lost(folder: Path, subject: Subject) -> dict[str, Any]:
    checkpoints = _copied(subject, folder / "lost", (1, 2, 3))
    try:
        checkpoints.load()
    except BaPipeError as error:
        return {"error": [type(error).__name__, str(error)], "said": list(subject.said)}
    finally:
        checkpoints.close()
    return {}


def _outcome(subject: Subject, path: Path) -> tuple[str, str]:
    """What a load gave, and with what error."""
    try:
        loaded = subject.checkpoints(path).load(path if path.name.startswith("step-") else None)
    except BaPipeError as error:
        return "refused", str(error)
    except Exception as error:
        return "foreign", repr(error)
    if loaded is None or loaded.data != ["a", loaded.step] or loaded.step not in (2, 3):
        return "wrong", repr(loaded)
    if not same(subject.saved["a", loaded.step], subject.state()):
        return "wrong", "other values"
    return ("same" if loaded.step == 3 else "went back"), ""


def _alone(path: Path, whole: dict[str, torch.Tensor]) -> tuple[str, str]:
    """What one process makes of it: an export, and a verification of its files."""
    try:
        summarise(path)
        verified = "damaged" if verify_files(path).damaged else "whole"
    except Exception as error:
        verified = f"foreign {error!r}"
    return _export(path, whole), verified


def _export(path: Path, whole: dict[str, torch.Tensor]) -> str:
    try:
        state = CheckpointState(path, pass_over=True)
        return "same" if same(dict(state), whole) and state.manifest.step == 3 else "wrong"
    except BaPipeError:
        return "refused"
    except Exception as error:
        return f"foreign {error!r}"


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
