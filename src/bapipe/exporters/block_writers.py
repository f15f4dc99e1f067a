"""Exports for engines that count blocks: Megatron, Colossal-AI, FlagScale."""

from __future__ import annotations

import itertools
import json

from bapipe.errors import BaPipeError
from bapipe.exporters.export_text import Export, Job, commented, header_lines
from bapipe.exporters.losses import find_losses
from bapipe.exporters.megatron_layout import layout_text
from bapipe.exporters.module_stages import block_stages
from bapipe.exporters.plan_features import replicas_of
from bapipe.records.plan import Plan

__all__ = ["write_colossalai", "write_flagscale", "write_megatron"]


def _ranks(plan: Plan) -> int:
    """Ranks of one pipeline."""
    return len({ranks[0] for ranks in plan.schedule.placement})


def write_megatron(job: Job) -> Export:
    """Arguments of Megatron-LM's pretrain scripts, one per line: `$(grep -v '^#' FILE)`."""
    plan = job.plan
    stages, moved = block_stages(plan)
    ranks = _ranks(plan)
    several = len(stages) > ranks
    losses = find_losses(job, moved=moved, own_order="interleaved" if several else "1f1b-sno")
    notes = (
        f"start pretrain_gpt.py with $(grep -v '^#' {job.out}); data parallelism is what ranks are left over",
        "Megatron-Bridge: model.pipeline_model_parallel_layout takes the same text",
    )
    arguments = {
        "--pipeline-model-parallel-size": ranks,
        "--pipeline-model-parallel-layout": layout_text(stages),
        "--num-layers": sum(stage.blocks for stage in stages),
        "--micro-batch-size": plan.microbatch_size,
        "--global-batch-size": plan.global_batch,
    }
    text = "".join(f"{name} {value}\n" for name, value in arguments.items())
    head = commented(header_lines(job, losses, notes))
    return Export(files={job.out: head + text}, losses=losses, notes=notes)


def write_colossalai(job: Job) -> Export:
    """Arguments of HybridParallelPlugin as a Python table; `HybridParallelPlugin(tp_size=1, **PIPELINE)`."""
    plan = job.plan
    stages, moved = block_stages(plan)
    ranks = _ranks(plan)
    chunks = len(stages) // ranks
    losses = find_losses(job, moved=moved, own_order="interleaved" if chunks > 1 else "1f1b-sno")
    replicas = replicas_of(plan) or 1
    if chunks > 1 and plan.microbatches % (ranks * replicas):
        raise BaPipeError(
            f"Colossal-AI's interleaved pipeline takes micro-batches in multiples of {ranks}, the plan has "
            f"{plan.microbatches}; plan with another --global-batch or --micro-batch"
        )
    notes = ("HybridParallelPlugin(tp_size=1, **PIPELINE, …) takes it",)
    values = {
        "pp_size": ranks,
        "pp_style": "interleaved" if chunks > 1 else "1f1b",
        "num_model_chunks": chunks,
        "num_layers_per_stage": [stage.blocks for stage in stages],
        "microbatch_size": plan.microbatch_size,
    }
    body = "".join(f"    {json.dumps(name)}: {json.dumps(value)},\n" for name, value in values.items())
    head = commented(header_lines(job, losses, notes))
    return Export(files={job.out: f"{head}\nPIPELINE = {{\n{body}}}\n"}, losses=losses, notes=notes)


def write_flagscale(job: Job) -> Export:
    """The `system` part of FlagScale's training configuration, with a process mesh for each run of like stages."""
    plan = job.plan
    stages, moved = block_stages(plan)
    losses = find_losses(job, moved=moved, own_order="1f1b-sno")
    kinds = {item.name: item.type for item in plan.cluster.accelerators}
    alike = []
    for index, stage in enumerate(plan.stages):
        own = {kinds[name] for name in stage.accelerators}
        if len(own) > 1:
            raise BaPipeError(
                f"stage {index} has replicas of types {', '.join(sorted(own))}, a process mesh of FlagScale has "
                "one; plan on one type per stage"
            )
        alike.append((own.pop(), len(stage.accelerators)))
    meshes, types = [], []
    for (kind, replicas), members in itertools.groupby(alike):
        meshes += [1, 1, 1, replicas, len(list(members))]
        types.append(kind)
    first = alike[0][1]
    wrong = next((replicas for _, replicas in alike if first * plan.microbatch_size % replicas), None)
    if wrong is not None:
        raise BaPipeError(
            f"FlagScale deals micro-batches of {plan.microbatch_size} on {first} replicas of the first stage to "
            f"{wrong} replicas, which does not go up; plan with another --micro-batch"
        )
    notes = ("hetero_current_device_type is set on each node, to the type of its own accelerators",)
    head = commented(header_lines(job, losses, notes))
    body = (
        "system:\n"
        "  tensor_model_parallel_size: 1\n"
        f"  pipeline_model_parallel_size: {len(stages)}\n"
        "  hetero:\n"
        "    enable_hetero: True\n"
        f"    hetero_pipeline_layer_split: {json.dumps([stage.blocks for stage in stages])}\n"
        "    # tensor, context, expert and data parallel size and stages of each mesh\n"
        f"    hetero_process_meshes: {json.dumps(meshes)}\n"
        f"    hetero_device_types: {json.dumps(types)}\n"
        "model:\n"
        f"  num_layers: {sum(stage.blocks for stage in stages)}\n"
        f"  micro_batch_size: {plan.microbatch_size}\n"
        f"  global_batch_size: {plan.global_batch}\n"
    )
    return Export(files={job.out: head + body}, losses=losses, notes=notes)
