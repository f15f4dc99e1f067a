"""Valid documents of every format that BaPipe reads, small ones. `fuzz_lines.py` has the commands that read each.

The documents are made by BaPipe's own commands, once per process, from the examples of the repository.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import tempfile
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from fuzz_mutations import json_text, toml_text

from bapipe.costs.profile import Profile, read_profile
from bapipe.fpga import explore_fpga, make_fpga_plan
from bapipe.hardware.cluster_file import read_cluster
from bapipe.io.files import content_hash, dump_json
from bapipe.models.layers import ModelRef
from bapipe.planner import Request, explore, make_plan
from bapipe.planner.inputs import layers_for_fpgas
from bapipe.planner.plan_timeline import plan_timeline
from bapipe.records.plan import Plan, read_plan
from bapipe.records.run_record import EventRecord, RunEnvironment, RunRecord, StepRecord, TransferRecord
from bapipe.schedule.actions import Action, Kind
from bapipe.schedule.generators import make_schedule
from bapipe.schedule.schedule_file import ScheduleFile, to_torch_csv
from bapipe.torch.checkpoint.checkpoint_manifest import MANIFEST, Manifest, SavedFile, dump_manifest

__all__ = ["Document", "companions", "documents", "signed_manifest", "with_hash_of"]

REPOSITORY = Path(__file__).parents[2]
EXAMPLES = REPOSITORY / "examples"


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A valid document."""

    name: str
    file: str
    """its name where commands read it"""
    values: Any
    """plain values; None: it has no structure but its lines"""
    text: str

    beside: Mapping[str, str] = field(default_factory=dict)
    """files that belong to it, such as a run of a plan; by name"""

    def written(self, values: Any) -> str:
        return toml_text(values) if self.file.endswith(".toml") else json_text(values)


def _json(name: str, file: str, text: str, beside: Mapping[str, str] | None = None) -> Document:
    return Document(name=name, file=file, values=json.loads(text), text=text, beside=beside or {})


def _toml(name: str, file: str, text: str) -> Document:
    return Document(name=name, file=file, values=tomllib.loads(text), text=text)


_REQUESTS = {
    "straight": Request(global_batch=8, stages=2, schedule="1f1b-so"),
    "gpipe": Request(global_batch=8, stages=2, schedule="gpipe", optimizer="adam"),
    "zero bubble": Request(global_batch=8, stages=2, schedule="zb-h1"),
    "interleaved": Request(global_batch=8, schedule="interleaved"),
    "data parallel": Request(global_batch=8, schedule="data-parallel"),
    "hybrid": Request(global_batch=8, strategy="pipedream"),
    "never flushes": Request(global_batch=8, schedule="pipedream"),
    "capped": Request(global_batch=8, stages=2, schedule="1f1b", cap=2),
    "v-shaped": Request(global_batch=8, schedule="zb-v"),
}


@cache
def _plans() -> dict[str, Plan]:
    profile = _with_modules()
    two, three = (
        read_cluster(str(EXAMPLES / "cluster-two-cpus.toml")),
        _three_cpus(),
    )
    found = {}
    for name, request in _REQUESTS.items():
        cluster = three if name == "hybrid" else two
        found[name] = make_plan(explore(profile, cluster, request))
    boards = layers_for_fpgas(str(EXAMPLES / "layers-small-cnn.toml"))
    chain = read_cluster("2xvcu118")
    found["boards"] = make_fpga_plan(
        explore_fpga(boards, chain, Request(global_batch=8, microbatch=1), dtype="fp16")
    )
    return found


def _three_cpus() -> Any:
    cluster = read_cluster(str(EXAMPLES / "cluster-two-cpus.toml"))
    last = cluster.accelerators[-1]
    more = replace(last, name=last.name.rpartition("/")[0] + "/2")
    return replace(cluster, accelerators=(*cluster.accelerators, more))


def _run(plan: Plan) -> RunRecord:
    """A run that took what was simulated."""
    timeline = plan_timeline(plan)
    names = [
        str(Action(int(stage), Kind(int(kind)), None if microbatch < 0 else int(microbatch)))
        for stage, kind, microbatch in zip(timeline.stages, timeline.kinds, timeline.microbatches, strict=True)
    ]
    ranks, sent = timeline.num_ranks, timeline.transfers
    return RunRecord(
        model=plan.model,
        plan_hash=content_hash(plan),
        environment=RunEnvironment(
            torch="2", python="3", hosts=("a",) * ranks, backend="gloo", threads=1, devices=("cpu",) * ranks
        ),
        world_size=ranks,
        steps=tuple(StepRecord(step=step, loss=1.0 / (step + 1), seconds=timeline.makespan) for step in range(3)),
        recorded_step=1,
        events=tuple(
            EventRecord(rank=int(rank), action=name, start=float(start), end=float(end))
            for rank, name, start, end in zip(timeline.ranks, names, timeline.start, timeline.end, strict=True)
        ),
        transfers=tuple(
            TransferRecord(
                action=names[int(source)], to_rank=int(rank), start=float(start), arrival=float(arrival)
            )
            for source, rank, start, arrival in zip(
                sent.source, sent.to_rank, sent.start, sent.arrival, strict=True
            )
        ),
        peak_in_flight=tuple(timeline.peak_in_flight()),
        peak_memory=(10**6,) * ranks,
        memory_source=("resident",) * ranks,
    )


def companions() -> dict[str, str]:
    """Valid files that stand beside the mutated one, by name."""
    plan = _plans()["straight"]
    return {
        "plan.json": dump_json(plan),
        "run.json": dump_json(_run(plan)),
        "profile.json": dump_json(_with_modules()),
        "cluster.toml": (EXAMPLES / "cluster-two-cpus.toml").read_text(),
        "trace.json": _trace("host"),
        "layout.args": _LAYOUT,
    }


@cache
def _with_modules() -> Profile:
    """The example's profile, with blocks for layers, and their modules."""
    profile = read_profile(EXAMPLES / "tiny-profile.json")
    layers = tuple(
        replace(layer, name=f"blocks.{index}", modules=(f"blocks.{index}",))
        for index, layer in enumerate(profile.layers)
    )
    return replace(profile, layers=layers)


def _trace(kind: str) -> str:
    """As PyTorch's profiler writes it, of two calls of the model; times of the host, or with kernels."""

    def event(category: str, name: str, start: float, length: float, thread: int, **more: Any) -> dict[str, Any]:
        return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": length, "pid": 1, "tid": thread,
                "args": more}  # fmt: skip

    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "python"}}]
    for call, layer in itertools.product(range(2), range(8)):
        number, start = 8 * call + layer, 1000.0 * call + 50.0 * layer
        back = 1000.0 * call + 900.0 - 50.0 * layer
        same = {"Sequence number": number}
        evaluated = f"{_EVALUATED}: AddmmBackward0"
        events += [
            event("user_annotation", f"blocks.{layer}", start, 30.0, 1),
            event("cpu_op", "aten::addmm", start + 2.0, 20.0, 1, **same, **{"Fwd thread id": 0}),
            event("cpu_op", evaluated, back, 40.0, 2, **same, **{"Fwd thread id": 1}),
        ]
        if kind == "kernels":
            for place, (at, thread) in enumerate(((start + 5.0, 1), (back + 5.0, 2))):
                link = {"correlation": 2 * number + place}
                events += [
                    event("cuda_runtime", "cudaLaunchKernel", at, 3.0, thread, **link),
                    event("kernel", "gemm", at + 100.0, 15.0, 7, **link),
                ]
    return json.dumps({"schemaVersion": 1, "traceEvents": events})


def _manifest() -> Document:
    """Of a checkpoint whose files hold no tensors: what lists and verifies it reads no more."""
    files = {"weights": "12345", ".metadata": "none", "state.pt": "none"}
    saved = {
        name: SavedFile(size=len(text), sha256=hashlib.sha256(text.encode()).hexdigest())
        for name, text in files.items()
    }
    manifest = Manifest(
        step=2, model=ModelRef(name="any"), saved_under="a plan", global_batch=4, microbatch_size=2, saved=(),
        tensors="0" * 64, files=saved, torch="2",
    )  # fmt: skip
    folder = "saved/step-00000002"
    beside = {f"{folder}/{name}": text for name, text in files.items()}
    return _json("two steps", f"{folder}/{MANIFEST}", dump_manifest(manifest), beside)


def signed_manifest(text: str) -> str:
    """With the checksum that it should have, so that a reader goes on; as it is where it is no JSON object."""
    try:
        values = json.loads(text)
        values.pop("sha256")
        digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
        return json.dumps({**values, "sha256": digest})
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        return text


def with_hash_of(run: str, plan: bytes) -> str:
    """The run as one of that plan, if the plan can be read: what compares the two goes on to do so."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        file.write(plan)
        file.flush()
        try:
            found = content_hash(read_plan(file.name))
        except Exception:  # a mistake of the reader is for the commands to show
            return run
    return re.sub(r'"plan_hash": "[0-9a-f]+"', f'"plan_hash": "{found}"', run)


@cache
def documents() -> dict[str, tuple[Document, ...]]:
    """By format."""
    plans = _plans()
    schedules = {
        "1f1b-so": make_schedule("1f1b-so", 3, 4),
        "zb-h1": make_schedule("zb-h1", 2, 4),
        "interleaved": make_schedule("interleaved", 2, 4, virtual=2),
        "replicas": make_schedule("gpipe", 2, 4, replicas=(2, 1)),
        "fbp-as": make_schedule("fbp-as", 2, 3),
        "pipedream": make_schedule("pipedream", 2, 4),
    }
    return {
        "plan": (
            *(
                _json(name, "plan.json", dump_json(plan), {"run.json": dump_json(_run(plan))})
                for name, plan in plans.items()
            ),
            _json("example", "plan.json", (EXAMPLES / "plan.json").read_text()),
            _json("two nodes", "plan.json", (EXAMPLES / "two-nodes" / "plan.json").read_text()),
        ),
        "run": tuple(
            _json(name, "run.json", dump_json(_run(plan)), {"plan.json": dump_json(plan)})
            for name, plan in plans.items()
            if name in ("straight", "zero bubble", "interleaved", "data parallel", "hybrid", "gpipe")
        ),
        "profile": (
            _json("modules", "profile.json", dump_json(_with_modules())),
            _json("example", "profile.json", (EXAMPLES / "tiny-profile.json").read_text()),
            _json("two types", "profile.json", (EXAMPLES / "mixed" / "both.json").read_text()),
        ),
        "cluster": tuple(
            _toml(file.stem, "cluster.toml", file.read_text()) for file in sorted(EXAMPLES.glob("cluster-*.toml"))
        ),
        "schedule": tuple(
            _json(name, "schedule.json", dump_json(ScheduleFile.of(made))) for name, made in schedules.items()
        ),
        "schedule table": tuple(
            Document(name=name, file="schedule.csv", values=None, text=to_torch_csv(schedules[name]))
            for name in ("1f1b-so", "zb-h1", "interleaved")
        ),
        "layers": (
            _toml("small", "layers.toml", (EXAMPLES / "layers-small-cnn.toml").read_text()),
            _toml("tied", "layers.toml", _TIED),
        ),
        "graph": (
            Document(
                name="small",
                file="small.graph.txt",
                values=None,
                text=(REPOSITORY / "tests" / "data" / "small.graph.txt").read_text(),
            ),
        ),
        "trace": tuple(_json(kind, "trace.json", _trace(kind)) for kind in ("host", "kernels")),
        "layout": (Document(name="megatron", file="layout.args", values=None, text=_LAYOUT),),
        "manifest": (_manifest(),),
    }


_EVALUATED = "autograd::engine::evaluate_function"
_LAYOUT = "--pipeline-model-parallel-size 2\n--pipeline-model-parallel-layout 'Et*3|(tt|)*2tL'\n"
_TIED = """
schema = "bapipe.layers/1"
name = "tied"
input_elements = 16
[[layers]]
name = "embedding"
forward_flops = 0
parameters = 4096
output_elements = 512
weight_reads = 0
error_elements = 0
split = 8
[[layers]]
name = "block"
kind = "block"
forward_flops = 1e6
parameters = 8192
output_elements = 512
saved_elements = 2048
moved_elements = 4096
elementwise_elements = 1024
weight_flops = 5e5
kernels = 4
[[layers]]
name = "head"
forward_flops = 1e6
parameters = 4096
output_elements = 256
shares_weights_with = "embedding"
split = 16
split_by = "vocabulary entries"
"""
