"""The commands that read each format, for files that are mutated."""

from __future__ import annotations

from collections.abc import Sequence

from bapipe.exporters.targets import TARGETS

__all__ = ["COMMANDS"]

_NARROW = "--strategy bapipe --schedule 1f1b-so --micro-batch 1 --global-batch 4"
_SMALL = "--global-batch 8 --micro-batch 1 --stages 2"
_HERE = "--profile profile.json --cluster cluster.toml"
_TIMES = "--forward 1 --backward 2"
_CORRECTING = "--profile profile.json --recalibrate again.json"

_LINES: dict[str, Sequence[str]] = {
    "plan": (
        "report plan.json -o out.html --trace trace.json",
        "report plan.json run.json -o out.html --profile profile.json --svg pictures",
        "report plan.json -o out.html --profile profile.json --explain",
        "launch plan.json --print --steps 2",
        f"compare plan.json run.json --json {_CORRECTING} --cluster-out c.toml",
        "compare plan.json run.json",
        *(f"export plan.json --to {engine} -o out.{engine}" for engine in TARGETS),
        f"judge plan.json {_HERE} {_SMALL}",
    ),
    "run": (
        f"compare plan.json run.json --json {_CORRECTING} --cluster-out c.toml",
        "compare plan.json run.json --trace trace.json",
        "report plan.json run.json -o out.html --trace trace.json --svg pictures",
    ),
    "profile": (
        f"plan profile.json --cluster cluster.toml {_NARROW} --out planned.json --report r.html",
        "report plan.json run.json -o out.html --profile profile.json",
        f"compare plan.json run.json {_CORRECTING}",
        "merge profile.json profile.json --replace -o merged.json",
        "merge profile.json other.json -o merged.json",
        f"judge 3,5 {_HERE} {_SMALL} --json",
        "import-trace trace.json --profile profile.json --accelerator gpu --micro-batch 2 -o traced.json",
    ),
    "cluster": (
        f"plan profile.json --cluster cluster.toml {_NARROW} --json",
        f"plan alexnet --cluster cluster.toml {_NARROW} --out planned.json",
        "cluster show cluster.toml",
        f"judge plan.json {_HERE} {_SMALL}",
    ),
    "schedule": (
        f"simulate schedule.json {_TIMES} --transfer 0.1 --svg s.svg",
        f"simulate schedule.json {_TIMES} --recompute --optimizer-step 1",
        f"simulate schedule.json {_TIMES} --links blocking --json",
        f"simulate schedule.json {_TIMES} --out out.csv --trace t.json",
        f"judge schedule.json --cuts 4,4 {_HERE} --global-batch 4",
    ),
    "schedule table": (
        f"simulate schedule.csv {_TIMES} --svg s.svg --out out.json",
        f"judge schedule.csv --cuts 4,4 {_HERE} --global-batch 4",
        f"judge schedule.csv --cuts 2,2,2,2 {_HERE} --global-batch 4 --json",
    ),
    "layers": (
        f"plan layers.toml --cluster 2xv100 {_NARROW} --json",
        "plan layers.toml --cluster 2xvcu118 --global-batch 4 --micro-batch 1 --stages 2",
        "plan layers.toml --cluster 2xv100 --global-batch 4 --micro-batch 1 --split-layers",
    ),
    "graph": ("plan small.graph.txt --cluster 2xv100 --schedule 1f1b-so --global-batch 64",),
    "trace": (
        "import-trace trace.json --profile profile.json --accelerator gpu --micro-batch 2 -o traced.json",
        "import-trace trace.json --profile profile.json --accelerator cpu-core --micro-batch 4 -o traced.json",
    ),
    "layout": (f"judge layout.args {_HERE} {_SMALL}", f"judge layout.args {_HERE} --global-batch 8 --json"),
    "manifest": ("checkpoint list saved", "checkpoint list saved --json", "checkpoint verify saved"),
}

COMMANDS: dict[str, Sequence[Sequence[str]]] = {
    kind: tuple(tuple(line.split()) for line in lines) for kind, lines in _LINES.items()
}
"""format -> every command that reads it, in a folder that has the document and its companions"""
