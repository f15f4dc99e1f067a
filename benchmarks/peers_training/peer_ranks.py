"""One rank of torch's own ways to train a model of the benchmark, several one after the other.

torchrun starts it with a file of jobs (`Rows.started` in run.py); the model is built and captured once. Rank 0
writes what each job took; a job that fails ends all ranks, and says why in a file of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import sys
import threading
import traceback
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

HERE = Path(__file__).resolve().parent
for _folder in (HERE, HERE.parent / "tinyllama", HERE.parent / "slices"):
    sys.path.insert(0, str(_folder))

from torch_schedules import TorchSchedule, timed_steps  # noqa: E402
from turns import Turn  # noqa: E402

from bapipe.hardware.precision import find_precision  # noqa: E402
from bapipe.models.model_spec import model_ref, parse_arguments  # noqa: E402
from bapipe.records.plan import read_plan  # noqa: E402
from bapipe.torch import slices  # noqa: E402
from bapipe.torch.capturing import Captured, capture  # noqa: E402
from bapipe.torch.device.allocator import keep_in_pages  # noqa: E402
from bapipe.torch.device.cuda_workspaces import release_workspaces  # noqa: E402
from bapipe.torch.device.precision_modes import set_precision  # noqa: E402
from bapipe.torch.health.parent_death import end_with_parent  # noqa: E402
from bapipe.torch.inputs.batch_call import as_call  # noqa: E402
from bapipe.torch.inputs.build_model import BuiltModel, build_model  # noqa: E402
from bapipe.torch.inputs.make_optimizer import make_optimizer  # noqa: E402
from bapipe.torch.inputs.training_data import batches_for  # noqa: E402
from bapipe.torch.stage.error_context import one_line  # noqa: E402

LARGEST_UNIT = 0.25
"""share of the parameters that FSDP2 gathers at once, at most"""


class DataParallel:
    """A rank of torch's DistributedDataParallel or FSDP2 with accumulation over micro-batches.

    Both sum gradients once a step. FSDP2 gathers the weights once, too, and keeps them until then: of its settings
    the one that sends least. It moves a unit to the device as it shards it, so that no rank ever holds the whole.
    """

    def __init__(
        self, module: nn.Module, kind: str, *, size: int, count: int, device: torch.device, compiled: bool
    ) -> None:
        self._size, self._count, self._device = size, count, device
        self._parts: list[Any] = []
        if kind == "ddp":
            ids = [0] if device.type == "cuda" else None
            self._ddp = DistributedDataParallel(module, device_ids=ids, gradient_as_bucket_view=True)
            self._run: Any = torch.compile(self._ddp) if compiled else self._ddp
            self._fsdp = None
        else:
            mesh = init_device_mesh(device.type, (dist.get_world_size(),))
            for unit in sharded_units(module):
                if compiled:
                    unit.compile()
                fully_shard(unit, mesh=mesh, reshard_after_forward=False)
            self._fsdp = fully_shard(module, mesh=mesh, reshard_after_forward=False)
            self._run = module
        self.parameters = list(module.parameters())

    def put(self, inputs: Any) -> None:
        whole = as_call(inputs)
        leaves, structure = torch.utils._pytree.tree_flatten((whole.args, whole.kwargs))
        rank, world = dist.get_rank(), dist.get_world_size()
        parts = list(zip(*(leaf.split(self._size) for leaf in leaves), strict=True))
        self._parts = [
            torch.utils._pytree.tree_unflatten([leaf.to(self._device) for leaf in parts[index]], structure)
            for index in range(rank, self._count, world)
        ]

    def step(self) -> Tensor:
        """Gradients of the global batch; this rank's share of its loss."""
        total, world = torch.zeros((), device=self._device), dist.get_world_size()
        for place, (args, kwargs) in enumerate(self._parts):
            with self._summing(last=place + 1 == len(self._parts)):
                found = self._run(*args, **kwargs)
                loss = (found if isinstance(found, Tensor) else found["loss"]) * world / self._count
                loss.backward()
            total += loss.detach() / world
        return total

    @contextlib.contextmanager
    def _summing(self, *, last: bool) -> Iterator[None]:
        if isinstance(self._fsdp, FSDPModule):
            self._fsdp.set_requires_gradient_sync(last)
            self._fsdp.set_reshard_after_backward(last)
            yield
            return
        with contextlib.nullcontext() if last else self._ddp.no_sync():
            yield


def sharded_units(module: nn.Module) -> list[nn.Module]:
    """Modules of lists, the outermost that are small enough: blocks of a transformer, stages of a network."""
    whole = sum(item.numel() for item in module.parameters())
    found: list[nn.Module] = []

    def look(owner: nn.Module) -> None:
        for child in owner.children():
            share = sum(item.numel() for item in child.parameters()) / whole
            listed = isinstance(owner, (nn.ModuleList, nn.Sequential)) and not isinstance(child, nn.ModuleList)
            if listed and 0 < share <= LARGEST_UNIT:
                found.append(child)
            else:
                look(child)

    look(module)
    return found


class Peers:
    """The model of all jobs, built and captured once."""

    def __init__(self, asked: dict[str, Any], device: torch.device) -> None:
        self.asked, self.device = asked, device
        self.size, self.count = asked["size"], asked["count"]
        self.turn = Turn(asked["turn"])
        set_precision(find_precision(asked["precision"]), device)

    @cached_property
    def built(self) -> BuiltModel:
        words = self.asked["arguments"]
        return build_model(
            model_ref(self.asked["spec"], parse_arguments(words)), precision=self.asked["precision"]
        )

    @cached_property
    def captured(self) -> Captured:
        return capture(self.built.module, self.built.args, self.built.kwargs, check=False)

    def run(self, job: dict[str, Any]) -> dict[str, Any]:
        """Train for some steps at a learning rate of 0, so that every job has the same weights."""
        self._clean()
        trained: Any
        if job["kind"] == "torch":
            plan = read_plan(job["plan"])
            trained = TorchSchedule(
                self.captured, plan, job["schedule"], device=self.device, compiled=job["compiled"]
            )
        else:
            module = self.built.module.train()
            module = module if job["kind"] == "fsdp" else module.to(self.device)
            trained = DataParallel(
                module, job["kind"], size=self.size, count=self.count, device=self.device, compiled=job["compiled"]
            )
        text = self.asked["optimizer"]
        if job["kind"] == "fsdp":  # whose parameters have a fused step of Adam, and of SGD the one that comes next
            text = text.replace("sgd(fused=true)", "sgd(foreach=true)")
        optimizer = make_optimizer(text, trained.parameters, rate=0.0)
        batches = batches_for(self.built, "synthetic", global_batch=self.size * self.count, seed=0)
        if not job["compiled"]:
            self._begin()
        timed_steps(trained.put, trained.step, optimizer, batches, 1, self.device)  # compiles what is compiled
        self._begin()
        told = timed_steps(trained.put, trained.step, optimizer, batches, job["steps"], self.device)
        self.turn.leave()
        if job["kind"] == "fsdp":  # its parameters are sharded in place
            self.__dict__.pop("built", None)
            self.__dict__.pop("captured", None)
        else:
            self.built.module.to("cpu").zero_grad(set_to_none=True)
        return told

    def _begin(self) -> None:
        """Begin on all ranks when it is their turn; who waits is on no GPU meanwhile, as in NCCL's barrier."""
        if dist.get_rank() == 0:
            self.turn.take()
        dist.all_reduce(torch.zeros(1))

    def _clean(self) -> None:
        torch._dynamo.reset()
        gc.collect()
        if self.device.type == "cuda":
            keep_in_pages(self.device)
            release_workspaces()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("jobs", type=Path)
    asked = json.loads(parser.parse_args().jobs.read_text(encoding="utf-8"))
    end_with_parent(os.getppid())  # torchrun's ranks outlive it where it is killed
    rank, on_gpu = int(os.environ["RANK"]), asked["device"] == "cuda"
    if on_gpu:
        cut = slices.status(0)
        assert cut is not None, "start the slices first"
        os.environ.update(slices.slice_environment(cut, asked["order"][rank]))
    else:
        torch.set_num_threads(1)
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    peers = Peers(asked, device)
    for job in asked["jobs"]:
        out = Path(job["out"])
        late = threading.Timer(asked["limit"], _end, (out, rank, f"not done within {asked['limit']:.0f} s"))
        late.daemon = True
        late.start()
        try:
            told = peers.run(job)
        except BaseException as error:
            traceback.print_exc()
            sys.stderr.flush()
            _end(out, rank, one_line(error))
        late.cancel()
        if rank == 0:
            part = out.with_suffix(".part")
            part.write_text(json.dumps(told), encoding="utf-8")
            part.rename(out)
        dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def _end(out: Path, rank: int, why: str) -> None:
    """Say why, and end at once: the others wait for this rank."""
    with contextlib.suppress(FileExistsError), out.with_suffix(".failed").open("x", encoding="utf-8") as file:
        file.write(f"rank {rank}: {why}")
    os._exit(1)


if __name__ == "__main__":
    main()
