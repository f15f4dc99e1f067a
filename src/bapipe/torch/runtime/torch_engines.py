"""Data parallelism as torch runs it: the user's own module under DistributedDataParallel or FSDP2 (`fully_shard`).

Every rank builds the whole model and runs the micro-batches that the plan gives it, each in one call.
Losses are weighed as a Pipeline weighs them, so that gradients are those of one loss of the whole global batch.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from bapipe.errors import BaPipeError
from bapipe.torch.capturing import capture
from bapipe.torch.capturing.loss_graph import own_loss
from bapipe.torch.comm import guarded
from bapipe.torch.comm.choose_transport import connect
from bapipe.torch.device.dtypes import autocast_dtype
from bapipe.torch.device.precision_modes import set_precision
from bapipe.torch.inputs.build_model import BuiltModel
from bapipe.torch.runtime.bucket_gradients import BucketGradients
from bapipe.torch.runtime.build_stages import unused_state
from bapipe.torch.runtime.microbatches import InputSpec, split_inputs, split_targets
from bapipe.torch.runtime.plan_checks import RunnablePlan
from bapipe.torch.stage.loss import LossSum, LossTotals
from bapipe.torch.stage.loss_weighing import Weighing

__all__ = ["TorchEngine"]


class TorchEngine:
    """A model that torch's DDP or FSDP2 trains by a plan; made on every rank at once."""

    def __init__(
        self, built: BuiltModel, runnable: RunnablePlan, device: torch.device, *, transport: str, timeout: float
    ) -> None:
        self.plan, self._sizes, self._device = runnable.plan, runnable.sizes, device
        schedule, rank = runnable.schedule, dist.get_rank()
        self._own = [index for index in range(len(self._sizes)) if schedule.rank_of(0, index) == rank]
        """micro-batches of this rank"""
        set_precision(self.plan.precision, device)
        self._cast = autocast_dtype(self.plan.precision)
        idle = self._capture(built, warns=rank == 0)
        gc.collect()  # what capturing leaves behind has the parameters, which FSDP2 replaces
        self.module = built.module.to(device).train()
        """the model; under FSDP2 its parameters are sharded"""
        connection = connect(transport, device=device, channels={}, timeout=timeout)
        self.backend = connection.sums
        """what the collectives go by"""
        group = connection.sum_group(range(dist.get_world_size()), device, datetime.timedelta(seconds=timeout))
        self._ddp: DistributedDataParallel | None = None
        self._gradients: BucketGradients | None = None
        if self.plan.engine == "ddp":
            self._wrap(group, idle)
        else:
            self._shard(group)

    def _capture(self, built: BuiltModel, *, warns: bool) -> set[str]:
        """Learn how the model is called and what its loss is; returns names of parameters that it does not use."""
        captured = capture(built.module, built.args, built.kwargs, check=False)
        self._spec = InputSpec.of(captured)
        self._loss = LossSum(Weighing(built.loss, own_loss(captured.program), warns=warns), self._sizes)
        self.draws = any(
            captured.at(size).stage(0, len(captured.layers) - 1).stage_spec.random for size in set(self._sizes)
        )
        """whether the model draws random numbers, such as for dropout"""
        return unused_state(captured).keys() & dict(built.module.named_parameters()).keys()

    def _wrap(self, group: dist.ProcessGroup, idle: set[str]) -> None:
        """In DDP, with gradients in its buckets."""
        used = [item for name, item in self.module.named_parameters() if item.requires_grad and name not in idle]
        self._gradients = BucketGradients(used)
        with self._gradients.laid_out():
            self._ddp = DistributedDataParallel(
                self.module,
                device_ids=[self._device] if self._device.type == "cuda" else None,
                process_group=group,
                gradient_as_bucket_view=True,
                find_unused_parameters=bool(idle),
            )

    def _shard(self, group: dist.ProcessGroup) -> None:
        """Each of the plan's units by itself, then the rest."""
        mesh = DeviceMesh.from_group(group, self._device.type)
        for path in self.plan.units:
            try:
                unit = self.module.get_submodule(path)
            except AttributeError:
                raise BaPipeError(
                    f"the plan shards '{path[:60]}', which the model does not have; profile and plan it again"
                ) from None
            fully_shard(unit, mesh=mesh)
        fully_shard(self.module, mesh=mesh)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """What an optimizer steps."""
        return list(self.module.parameters())

    def step(self, inputs: Any, targets: Any) -> float:
        """Gradients of one global batch into the parameters, in place of those before; the loss, on every rank."""
        leaves = split_inputs(self._spec, inputs, self._sizes, needed=set(range(len(self._spec.batched))))
        parts = split_targets(targets, self._sizes, self._device) if targets is not None else []
        self._loss.begin()
        self._clear()
        # Both engines take the mean over ranks, and the sum is wanted.
        self._loss.scale = torch.tensor(float(dist.get_world_size()), device=self._device)
        for place, index in enumerate(self._own):
            own = [leaf.to(self._device) if isinstance(leaf, Tensor) else leaf for leaf in leaves[index]]
            with self._summing(last=place == len(self._own) - 1):
                self._run(own, parts[index] if parts else None, index)
        return self._finish()

    def _clear(self) -> None:
        if self._ddp is not None and self._gradients is not None:
            self._gradients.clear(self._ddp)
            return
        for parameter in self.module.parameters():
            parameter.grad = None

    def _run(self, leaves: list[Any], target: Any, index: int) -> None:
        args, kwargs = self._spec.call(leaves)
        module = self.module if self._ddp is None else self._ddp
        with self._casting():
            loss = self._loss.of(module(*args, **kwargs), target, index, count=True)
        loss.backward()  # type: ignore[no-untyped-call]

    def _casting(self) -> contextlib.AbstractContextManager[Any]:
        if self._cast is None:
            return contextlib.nullcontext()
        return torch.autocast(self._device.type, dtype=self._cast)

    def _summing(self, *, last: bool) -> contextlib.AbstractContextManager[Any]:
        """DDP sums the gradients once; FSDP2, whose gradients are sharded, after every micro-batch."""
        return contextlib.nullcontext() if last or self._ddp is None else self._ddp.no_sync()

    def _finish(self) -> float:
        losses = self._loss.sums()
        sums = torch.tensor([*losses], dtype=torch.float64)
        with guarded(None):
            dist.all_reduce(sums)
        totals = LossTotals(*sums.tolist())
        divisor = totals.divisor()
        if divisor is None:
            return totals.loss
        if divisor == 0:
            return math.nan
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                parameter.grad /= divisor
        return totals.loss / divisor

    def gradients(self) -> dict[str, Tensor]:
        """A copy of every gradient, whole, in host memory; zeros where none came. All ranks call it."""
        found = {}
        for name, parameter in self.module.named_parameters():
            whole = parameter if parameter.grad is None else parameter.grad
            whole = whole.full_tensor() if isinstance(whole, DTensor) else whole
            whole = torch.zeros_like(whole) if parameter.grad is None else whole
            found[name] = whole.detach().to("cpu", copy=True)
        return found
