"""Exports for engines that name modules: torchtitan, NeMo Automodel, and transformers' device maps."""

from __future__ import annotations

import json
import re

from bapipe.errors import BaPipeError
from bapipe.exporters.export_text import Export, Job, commented, header_lines, order_csv, python_lists, yaml_rows
from bapipe.exporters.losses import find_losses
from bapipe.exporters.module_stages import ModuleStages, block_stages, module_stages
from bapipe.exporters.plan_features import replicas_of
from bapipe.io.files import dump_json
from bapipe.records.plan import Plan

__all__ = ["write_automodel", "write_device_map", "write_torchtitan"]

_TITAN_NAME = re.compile(r"[A-Za-z_]\w*(\.\d+)?")
"""what torchtitan finds: a module of the model itself, or an entry of a list of it"""


def _pipeline_ranks(plan: Plan) -> int:
    return len({ranks[0] for ranks in plan.schedule.placement})


def _local_batch(plan: Plan) -> int:
    """Samples per step of one replica of the pipeline."""
    return plan.global_batch // (replicas_of(plan) or 1)


def _titan_stages(job: Job) -> tuple[tuple[tuple[str, ...], ...], tuple[str, ...], tuple[str, ...]]:
    """(modules of each stage, cuts that moved, notes): the plan's own names where torchtitan finds them."""
    if any(stage.modules for stage in job.plan.stages):
        found = module_stages(job.plan)
        lists = {path.split(".")[0] for stage in found.stages for path in stage if "." in path}
        if len(lists) <= 1 and all(_TITAN_NAME.fullmatch(path) for stage in found.stages for path in stage):
            return found.stages, found.moved, ()
    stages, moved = block_stages(job.plan)
    output = "output" if job.version == "0.2" else "lm_head"
    rows, done = [], 0
    for stage in stages:
        blocks = [f"layers.{number}" for number in range(done, done + stage.blocks)]
        done += stage.blocks
        rows.append((*["tok_embeddings"] * stage.embedding, *blocks, *["norm", output] * stage.head))
    return (
        tuple(rows),
        moved,
        (f"modules are named as in torchtitan's own decoders, not as in {job.plan.model.name}",),
    )


def write_torchtitan(job: Job) -> Export:
    """`parallelism` for a torchtitan configuration: Python from 0.3 on, before that TOML."""
    plan = job.plan
    rows, moved, notes = _titan_stages(job)
    csv = order_csv(plan)
    losses = find_losses(job, moved=moved, own_order=None if csv else "1f1b-sno")
    replicas = replicas_of(plan) or 1
    fields: dict[str, str] = {"pipeline_parallel_degree": str(_pipeline_ranks(plan))}
    if replicas > 1:
        fields["data_parallel_replicate_degree"] = str(replicas)
        fields["data_parallel_shard_degree"] = "1"
    toml = job.version == "0.2"
    fields["module_fqns_per_model_part"] = python_lists(rows, indent="" if toml else "    ")
    fields["pipeline_parallel_schedule"] = '"1F1B"' if csv is None else '"PipelineScheduleMulti"'
    if csv is not None:
        path = json.dumps(job.csv) if toml else 'str(Path(__file__).with_suffix(".csv"))'
        fields["pipeline_parallel_schedule_csv"] = path
    if job.version == "main":
        fields["num_pp_microbatches"] = str(plan.microbatches // replicas)
    else:
        fields["pipeline_parallel_microbatch_size"] = str(plan.microbatch_size)
        notes = (*notes, f"training.local_batch_size is {_local_batch(plan)}")
    head = commented(header_lines(job, losses, notes))
    if toml:
        body = "[parallelism]\n" + "".join(f"{name} = {value}\n" for name, value in fields.items())
    else:
        body = (
            "\nfrom pathlib import Path\n\nfrom torchtitan.config import ParallelismConfig\n\n"
            "parallelism = ParallelismConfig(\n"
            + "".join(f"    {name}={value},\n" for name, value in fields.items())
            + ")\n"
        )
    files = {job.out: head + body}
    if csv is not None:
        files[job.csv] = csv
    return Export(files=files, losses=losses, notes=notes)


def write_automodel(job: Job) -> Export:
    """`distributed` of a NeMo Automodel recipe."""
    plan = job.plan
    found = module_stages(plan)
    csv = order_csv(plan)
    losses = find_losses(job, moved=found.moved, own_order=None if csv else "1f1b-sno")
    rows = _with_positions(found)
    notes = (f"step_scheduler.local_batch_size is {_local_batch(plan)}, the batch of one pipeline",)
    head = commented(header_lines(job, losses, notes))
    order = "    pp_schedule: 1f1b\n" if csv is None else f"    pp_schedule_csv: {json.dumps(job.csv)}\n"
    body = (
        "distributed:\n"
        f"  pp_size: {_pipeline_ranks(plan)}\n"
        f"  dp_size: {replicas_of(plan) or 1}\n"
        "  pipeline:\n"
        f"{order}"
        f"    pp_microbatch_size: {plan.microbatch_size}\n"
        f"    pp_batch_size: {_local_batch(plan)}\n"
        "    scale_grads_in_schedule: false\n"
        "    module_fqns_per_model_part:\n"
        f"{yaml_rows(rows, indent='      ')}"
    )
    files = {job.out: head + body}
    if csv is not None:
        files[job.csv] = csv
    return Export(files=files, losses=losses, notes=notes)


def _with_positions(found: ModuleStages) -> tuple[tuple[str, ...], ...]:
    """Rotary positions are computed by every stage, so every stage of Automodel keeps their module."""
    rotary = [path for stage in found.stages for path in stage if path.rpartition(".")[2] == "rotary_emb"]
    return tuple(
        (*(path for path in stage if path not in rotary), *dict.fromkeys(rotary)) for stage in found.stages
    )


def write_device_map(job: Job) -> Export:
    """`device_map` of from_pretrained: modules to accelerators. JSON has no comments, so notes lie beside."""
    plan = job.plan
    found = module_stages(plan)
    losses = find_losses(job, moved=found.moved)
    nodes = {item.name: item.node for item in plan.cluster.accelerators}
    used = {nodes[stage.accelerators[0]] for stage in plan.stages}
    if len(used) > 1:
        raise BaPipeError(
            f"a device map is for one process, the plan uses nodes {', '.join(sorted(used))[:120]}; plan for "
            "one node"
        )
    own = [item.name for item in plan.cluster.accelerators if item.node in used]
    places: dict[str, int] = {}
    for stage, paths in zip(plan.stages, found.stages, strict=True):
        for path in paths:
            places.setdefault(path, own.index(stage.accelerators[0]))
    notes = ("micro-batches do not overlap: one accelerator computes at a time",)
    stem = job.out.rpartition(".")[0] or job.out
    text = "".join(f"{line}\n" for line in header_lines(job, losses, notes))
    return Export(files={job.out: dump_json(places), f"{stem}.txt": text}, losses=losses, notes=notes)
