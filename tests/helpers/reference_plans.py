"""Plans that a change of structure must not change, and how they are recorded.

`python tests/helpers/reference_plans.py` plans every case again and writes tests/data/reference_plans.json. That
is for changes that mean to change plans; say in the commit which plans changed and why.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bapipe.models.builtin import BUILTIN_NAMES
from command import bapipe
from paths import REPOSITORY

__all__ = ["REFERENCE", "Case", "cases", "planned"]

REFERENCE = REPOSITORY / "tests" / "data" / "reference_plans.json"
CLUSTERS = ("4xv100", "8xa100", "2xa100+2xv100")
OTHERS = {
    "adam": ("bert-large", "--cluster", "8xa100", "--optimizer", "adam"),
    "slow links": ("vgg16", "--cluster", "4xv100", "--link-bandwidth", "0.8GB/s", "--global-batch", "1024"),
    "little memory": ("gpt2-xl", "--cluster", "8xa100", "--memory-limit", "12GB", "--optimizer", "adam"),
    "split layers": ("gnmt-8", "--cluster", "4xv100", "--global-batch", "512", "--split-layers"),
    "mixed slices": ("examples/mixed/both.json", "--cluster", "examples/mixed/cluster.toml"),
    "two nodes": ("gpt2-large", "--cluster", "examples/two-nodes/cluster.toml"),
    "the paper's space": ("vgg16", "--cluster", "4xv100", "--space", "paper", "--strategy", "bapipe"),
    "FPGAs": ("resnet50", "--cluster", "2xvcu129+2xvcu118", "--global-batch", "128"),
    **{
        schedule: ("resnet50", "--cluster", "4xv100", "--global-batch", "512", "--schedule", schedule)
        for schedule in (
            *("1f1b-sno", "1f1b-so", "gpipe", "zb", "zb-h1", "zb-h2", "interleaved", "pipedream"),
            *("zb-v", "v-half", "dualpipe-v"),
        )
    },
}
STAGE_WORDS = ("accelerators", "first_layer", "last_layer", "fractions", "recompute", "in_flight")
STAGE_FIGURES = (
    "forward",
    "backward",
    "weight_gradient",
    "update",
    "all_reduce",
    "memory_bytes",
    "workspace_bytes",
)
SLICES = """
schema = "bapipe.cluster/1"
name = "four slices"
[[accelerators]]
type = "{kind}"
count = 4
[types."{kind}"]
kind = "gpu"
memory = "16 GB"
memory_bandwidth = "1.1 TB/s"
flops = {{ fp32 = "16 TFLOPS" }}
[links.within]
bandwidth = "2.9 GB/s"
latency = "100 us"
"""


@dataclass(frozen=True)
class Case:
    name: str
    arguments: tuple[str, ...]
    slices_of: str | None = None
    """the accelerator type of a cluster that is in no catalogue"""


def cases() -> Iterator[Case]:
    """Every built-in model on three clusters, every measured profile on its accelerators, and other options."""
    for model in BUILTIN_NAMES:
        for cluster in CLUSTERS:
            yield Case(f"{model} on {cluster}", (model, "--cluster", cluster))
    for path in sorted((REPOSITORY / "profiles").rglob("*.json")):
        profile = json.loads(path.read_text(encoding="utf-8"))
        for kind in profile["accelerators"]:
            relative = path.relative_to(REPOSITORY).as_posix()
            arguments = (relative, "--global-batch", "256", "--dtype", profile["dtype"])
            yield Case(f"{relative} on 4x{kind}", arguments, slices_of=kind)
    for name, arguments in OTHERS.items():
        yield Case(name, arguments)


def planned(case: Case) -> dict[str, Any]:
    """What the plan says that must stay: words, and figures apart; only the exit code where nothing fits."""
    arguments = list(case.arguments)
    with tempfile.TemporaryDirectory() as folder:
        if case.slices_of is not None:
            cluster = Path(folder) / "cluster.toml"
            cluster.write_text(SLICES.format(kind=case.slices_of), encoding="utf-8")
            arguments += ["--cluster", str(cluster)]
        done = bapipe("plan", *arguments, "--json", folder=REPOSITORY)
    if done.returncode:
        assert "nothing fits" in done.stderr, (case, done.stderr)
        return {"exit": done.returncode}
    found: dict[str, Any] = json.loads(done.stdout)
    words = {key: found.get(key) for key in ("kind", "schedule", "microbatch_size", "microbatches", "caps")}
    words["stages"] = [{key: stage[key] for key in STAGE_WORDS if key in stage} for stage in found["stages"]]
    figures = [found[key] for key in ("time", "lower_bound", "bubble")]
    figures += [stage[key] for stage in found["stages"] for key in STAGE_FIGURES if key in stage]
    figures += [
        figure
        for alternative in found["alternatives"]
        for figure in (alternative["time"], alternative["memory_bytes"])
    ]
    return {"words": words, "figures": figures}


def record() -> None:
    found = {case.name: planned(case) for case in cases()}
    text = ",\n".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in found.items())
    REFERENCE.write_text("{\n" + text + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    record()
