"""One rank of torch's DistributedDataParallel on a model of the benchmark.

Gradients are accumulated over micro-batches. torchrun starts it; rank 0 writes what it took.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from bapipe.hardware.precision import find_precision
from bapipe.models.model_spec import model_ref, parse_arguments
from bapipe.torch import slices
from bapipe.torch.device.dtypes import autocast_dtype
from bapipe.torch.inputs.batch_call import Call, as_call
from bapipe.torch.inputs.build_model import build_model
from bapipe.torch.inputs.training_data import batches_for
from models import MODELS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    on_gpu = given.device == "cuda"
    if on_gpu:
        cut = slices.status(0)
        assert cut is not None, "start the slices first"
        os.environ.update(slices.slice_environment(cut, rank))
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    about = MODELS[given.model]
    words = about.arguments(tiny=given.tiny)
    built = build_model(model_ref(about.spec, parse_arguments(words[1::2])), precision=given.precision)
    module = built.module.to(device).train()
    autocast = autocast_dtype(find_precision(given.precision))
    samples = about.size * about.count
    batch = batches_for(built, "synthetic", global_batch=samples, seed=0)
    trained = DistributedDataParallel(module, device_ids=[0] if on_gpu else None, gradient_as_bucket_view=True)
    run = torch.compile(trained) if given.compile else trained
    fused = {"fused": True} if on_gpu else {}
    kind = torch.optim.SGD if about.optimizer == "sgd" else torch.optim.Adam
    optimizer = kind(module.parameters(), lr=1e-4, **fused)
    own = range(rank, about.count, world)
    seconds, losses = [], []
    for step in range(given.steps):
        parts = split(batch(step)[0], about.size)
        _settle(device)
        dist.barrier()
        start = time.perf_counter()
        total = torch.zeros((), device=device)
        for index in own:
            held = trained.no_sync() if index != own[-1] else contextlib.nullcontext()
            args, kwargs = tree_map_only(Tensor, lambda leaf: leaf.to(device), tuple(parts[index]))
            with held:
                with torch.autocast(device.type, autocast, enabled=autocast is not None):
                    loss = run(*args, **kwargs)
                loss = loss if isinstance(loss, Tensor) else loss.loss
                (loss / len(own)).backward()
            total += loss.detach() / len(own)
        optimizer.step()
        optimizer.zero_grad()
        _settle(device)
        dist.barrier()
        seconds.append(time.perf_counter() - start)
        total = total.cpu()
        dist.all_reduce(total)
        losses.append(float(total) / world)
    peaks: list[int] = [0] * world
    dist.all_gather_object(peaks, torch.cuda.max_memory_allocated() if on_gpu else 0)
    if rank == 0:
        row = {"samples_per_second": samples / median(seconds[2:]), "seconds": seconds}
        given.out.write_text(json.dumps({**row, "losses": losses, "peaks": peaks}))
    dist.barrier()
    os._exit(0)


def split(inputs: Any, size: int) -> list[Call]:
    """The micro-batches of a global batch, as calls of the model."""
    whole = as_call(inputs)
    leaves, structure = tree_flatten((whole.args, whole.kwargs))
    parts = zip(*(leaf.split(size) for leaf in leaves), strict=True)
    return [Call(*tree_unflatten(list(part), structure)) for part in parts]


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
