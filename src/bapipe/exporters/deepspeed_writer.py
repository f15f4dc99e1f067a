"""Export for DeepSpeed: a PipelineModule with the plan's cuts, as it has no setting for a list of cuts."""

from __future__ import annotations

import itertools
import json

from bapipe.errors import BaPipeError
from bapipe.exporters.export_text import Export, Job, commented, header_lines
from bapipe.exporters.losses import find_losses
from bapipe.exporters.module_stages import module_stages
from bapipe.exporters.plan_features import replicas_of
from bapipe.io.files import dump_json

__all__ = ["write_deepspeed"]

_CODE = '''
from deepspeed.pipe import PipelineModule

LAYERS = {layers}
"""modules in the order in which they run, by their paths in {model}"""
PARTS = {parts}
"""the place in LAYERS where each stage begins, and the end"""


class PlannedPipeline(PipelineModule):
    """A PipelineModule that is cut where the plan cuts it."""

    def __init__(self, layers, **options):
        layers = list(layers)
        if len(layers) != PARTS[-1]:
            raise ValueError(f"the plan has {{PARTS[-1]}} layers (LAYERS), got {{len(layers)}}; give one for each")
        super().__init__(layers=layers, num_stages=len(PARTS) - 1, **options)

    def _partition_layers(self, method="uniform"):
        self.parts = list(PARTS)
        stage = self._topo.get_coord(self.global_rank).pipe
        self._set_bounds(start=self.parts[stage], stop=self.parts[stage + 1])


def planned_pipeline(model, **options):
    """The modules of a model as a pipeline: each takes what the one before returns."""
    return PlannedPipeline([model.get_submodule(path) for path in LAYERS], **options)
'''


def write_deepspeed(job: Job) -> Export:
    """Python with PlannedPipeline, and the batch sizes as DeepSpeed's JSON."""
    plan = job.plan
    found = module_stages(plan)
    losses = find_losses(job, moved=found.moved, own_order="1f1b-sno")
    layers = [path for stage in found.stages for path in stage]
    twice = next((path for path in layers if layers.count(path) > 1), None)
    if twice is not None:
        raise BaPipeError(
            f"'{twice}' runs in several stages, so {plan.model.name} is no sequence of modules as DeepSpeed "
            "takes; export it --to torch"
        )
    parts = [0, *itertools.accumulate(len(stage) for stage in found.stages)]
    replicas = replicas_of(plan) or 1
    stem = job.out.rpartition(".")[0] or job.out
    notes = (
        "planned_pipeline(model) is right where every module takes what the one before returns; else give "
        "PlannedPipeline one LayerSpec (TiedLayerSpec for tied weights) for each of LAYERS",
        f"deepspeed.initialize takes {stem}.json as its config, with the optimizer added",
    )
    rows = "[\n" + "".join(f"    {json.dumps(path)},\n" for path in layers) + "]"
    code = _CODE.format(layers=rows, parts=parts, model=plan.model.name)
    config = {
        "train_batch_size": plan.global_batch,
        "train_micro_batch_size_per_gpu": plan.microbatch_size,
        "gradient_accumulation_steps": plan.microbatches // replicas,
    }
    head = commented(header_lines(job, losses, notes))
    return Export(files={job.out: head + code, f"{stem}.json": dump_json(config)}, losses=losses, notes=notes)
