"""Reads one export by the engine that it is for: `python read_export.py TARGET FILE`. Prints JSON."""

import json
import os
import runpy
import sys
from importlib.metadata import version
from pathlib import Path

import torch
from chains import decoder, loss, make_batch


def megatron(path: str) -> dict[str, object]:
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    lines = [line for line in Path(path).read_text().splitlines() if not line.startswith("#")]
    given = dict(line.split(" ", 1) for line in lines)
    layout = PipelineParallelLayerLayout(
        given["--pipeline-model-parallel-layout"], int(given["--pipeline-model-parallel-size"])
    )
    layout.validate_layer_layout(int(given["--num-layers"]), 0)
    blocks = [[row.count(LayerType.decoder) for row in rank] for rank in layout.layout]
    return {"version": version("megatron-core"), "read": f"blocks per rank and virtual stage {blocks}"}


def torchtitan(path: str) -> dict[str, object]:
    from torch.distributed.pipelining.schedules import get_schedule_class
    from torchtitan.config import ParallelismConfig

    found = runpy.run_path(path)["parallelism"]
    assert isinstance(found, ParallelismConfig)
    get_schedule_class(found.pipeline_parallel_schedule)
    assert os.path.isfile(found.pipeline_parallel_schedule_csv)
    rows = found.module_fqns_per_model_part
    text = f"ParallelismConfig with {[len(row) for row in rows]} modules"
    from torchtitan.distributed.pipeline_parallel import _split_module

    torch.manual_seed(0)
    model = decoder()
    value = make_batch(0, 3)[0][0]
    whole = model(value)
    for row in rows:
        value = _split_module(model, row)(value)
    assert torch.equal(value, whole)
    return {
        "version": version("torchtitan"),
        "read": f"{text}; its _split_module's parts compute what the model does",
    }


def automodel(path: str) -> dict[str, object]:
    import yaml
    from nemo_automodel.components.distributed.pipelining.config import PipelineConfig

    table = yaml.safe_load(Path(path).read_text())["distributed"]
    found = PipelineConfig(**table["pipeline"])
    assert os.path.isfile(found.pp_schedule_csv)
    sizes = [len(row) for row in found.module_fqns_per_model_part]
    return {"version": version("nemo-automodel"), "read": f"PipelineConfig with {sizes} modules"}


def deepspeed(path: str) -> dict[str, object]:
    """On every rank: builds the pipeline and trains three steps."""
    import deepspeed as engine
    import deepspeed.comm as dist

    # An all-reduce in shared memory would be compiled first.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
    engine.init_distributed(dist_backend="gloo")
    made = runpy.run_path(path)
    torch.manual_seed(0)
    net = made["planned_pipeline"](decoder().float(), loss_fn=loss)  # it sums no float64 gradients
    config = json.loads(Path(path).with_suffix(".json").read_text())
    trained, *_ = engine.initialize(
        model=net, config=config, optimizer=torch.optim.SGD(list(net.parameters()), lr=0.01)
    )
    steps, size = [], config["train_micro_batch_size_per_gpu"]
    for step in range(3):
        inputs, target = make_batch(1 + step, config["train_batch_size"])
        parts = zip(inputs[0].split(size), target.split(size), strict=True)
        steps.append(float(trained.train_batch(data_iter=iter(parts))))
    parts = [len(net.parts), net.parts]
    dist.barrier()
    if dist.get_rank():
        sys.exit(0)
    return {"version": version("deepspeed"), "losses": steps, "read": f"PipelineModule with parts {parts[1]}"}


def device_map(path: str) -> dict[str, object]:
    from accelerate import dispatch_model
    from accelerate.utils import check_device_map

    places = json.loads(Path(path).read_text())
    torch.manual_seed(0)
    model = decoder()
    value = make_batch(0, 3)[0][0]
    whole = model(value)
    check_device_map(model, places)
    spread = dispatch_model(model, dict.fromkeys(places, "cpu"), force_hooks=True)
    assert torch.equal(spread(value), whole)
    return {
        "version": version("accelerate"),
        "read": f"check_device_map takes {len(places)} modules; it computes alike",
    }


if __name__ == "__main__":
    readers = {"megatron": megatron, "torchtitan": torchtitan, "automodel": automodel, "deepspeed": deepspeed,
               "device-map": device_map}  # fmt: skip
    print("FOUND " + json.dumps(readers[sys.argv[1]](sys.argv[2])), flush=True)
