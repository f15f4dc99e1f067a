"""Plans of examples/tiny_gpt2.py, cut where the test says, without a profile."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

from bapipe.models.layers import ModelRef
from bapipe.records.plan import read_plan, write_plan
from bapipe.schedule.generators import make_schedule
from bapipe.schedule.schedule_file import ScheduleFile
from paths import REPOSITORY

__all__ = ["tiny_gpt2", "tiny_gpt2_plan"]


def tiny_gpt2() -> ModuleType:
    """The example's module."""
    known = sys.modules.get("tiny_gpt2")
    if known is not None:
        return known
    spec = importlib.util.spec_from_file_location("tiny_gpt2", REPOSITORY / "examples" / "tiny_gpt2.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["tiny_gpt2"] = module
    spec.loader.exec_module(module)
    return module


def tiny_gpt2_plan(path: Path, *, float64: bool = False, adapters: bool = False) -> None:
    """Two stages of equal numbers of layers on two CPUs, global batches of 8 in micro-batches of 2."""
    from bapipe.torch.capturing import capture

    module, args, kwargs = tiny_gpt2().build(float64=float64, adapters=adapters)
    names = [layer.name for layer in capture(module, args, kwargs, check=False).layers]
    made = read_plan(REPOSITORY / "examples" / "plan.json")
    cut = len(names) // 2
    ends = ((0, cut - 1), (cut, len(names) - 1))
    stages = [
        replace(stage, first_layer=first, last_layer=last, layers=tuple(names[first : last + 1]), recompute=False)
        for stage, (first, last) in zip(made.stages, ends, strict=True)
    ]
    plan = replace(
        made,
        model=ModelRef(name="tiny", ref="tiny_gpt2:build"),
        dtype="fp64" if float64 else "fp32",
        global_batch=8,
        microbatches=4,
        microbatch_size=2,
        stages=tuple(stages),
        schedule=ScheduleFile.of(make_schedule("1f1b-so", 2, 4)),
    )
    write_plan(plan, path)
