"""The one place that reaches into torch.distributed.pipelining, whose runtime for any order is private.

Its parts differ between versions: up to torch 2.12 a stage takes every received value for one with a gradient;
since 2.13 the examples that a stage is made with say which have one.
"""

from __future__ import annotations

import inspect
import logging
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _Action, _add_send_recv, _PipelineScheduleRuntime

from bapipe.errors import BaPipeError
from bapipe.torch.device.tensor_internals import is_view

__all__ = ["ActionWatch", "ComputedStage", "TorchOrder", "TorchStage", "carries_any_value"]


class ActionWatch(Protocol):
    """Hears of every action that torch's runtime computes."""

    def __call__(self, stage: int, kind: str, microbatch: int) -> AbstractContextManager[None]:
        """The action runs within."""


class ComputedStage(nn.Module):
    """A stage as torch runs it: what `compute(microbatch, received)` returns, with its graph."""

    def __init__(self, stage: nn.Module, compute: Any, *, split: bool) -> None:
        """`stage` has the parameters; `split`: torch does its backward in two parts. It then detaches what is
        returned in place, which a view, a received tensor or one that the stage computes on with cannot be, and
        finds weights by where they meet what was received, so what is made without that has to meet it here."""
        super().__init__()
        self.stage = stage
        self.microbatch = 0
        """set before every forward"""
        self._compute = compute
        self._split = split
        self._apart: tuple[bool, ...] | None = None
        """for each value that is returned, whether it is made of weights and of nothing that was received"""
        self._used: tuple[bool, ...] = ()
        """and whether another one is computed from it"""

    def forward(self, *received: Tensor) -> tuple[Tensor, ...]:
        made = tuple(value.contiguous() for value in self._compute(self.microbatch, received))
        leaves = [value for value in received if value.requires_grad]
        if not self._split or not torch.is_grad_enabled():
            return made
        if self._apart is None:
            self._apart = tuple(bool(leaves) and _made_without(value, leaves) for value in made)
            self._used = _used_by_others(made)
        given = {id(value) for value in received}
        return tuple(
            _Met.apply(value, leaves[0])  # type: ignore[no-untyped-call]
            if apart
            else value.clone()
            if value.requires_grad and (used or is_view(value) or id(value) in given)
            else value
            for value, apart, used in zip(made, self._apart, self._used, strict=True)
        )


class _Met(torch.autograd.Function):
    """A copy of a value that counts as made from a received one, which gets no gradient by it."""

    @staticmethod
    def forward(_ctx: Any, value: Tensor, _received: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(_ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def _made_without(value: Tensor, leaves: Sequence[Tensor]) -> bool:
    """Whether a value has a graph in which none of the leaves is."""
    if value.grad_fn is None:
        return False
    known = {id(leaf) for leaf in leaves}
    return all(id(getattr(node, "variable", None)) not in known for node in _graph([value]))


def _used_by_others(values: Sequence[Tensor]) -> tuple[bool, ...]:
    """For each value, whether it is in the graph of another one."""
    nodes = [value.grad_fn for value in values]
    above = {after for node in _graph(values) for after, _ in node.next_functions}
    return tuple(node is not None and (node in above or nodes.count(node) > 1) for node in nodes)


def _graph(values: Sequence[Tensor]) -> set[Any]:
    """All nodes that the values are made by."""
    seen: set[Any] = set()
    waiting: list[Any] = [value.grad_fn for value in values]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [after for after, _ in node.next_functions]
    return seen


def carries_any_value() -> bool:
    """Whether values without a gradient, such as integers, may cross a cut in this version of torch."""
    return "output_grads" in inspect.signature(PipelineStage.__init__).parameters


class TorchStage(PipelineStage):
    """torch's stage, of which every action is watched. Examples of what it takes and makes are on the meta
    device."""

    def __init__(
        self,
        module: ComputedStage,
        *,
        index: int,
        count: int,
        device: torch.device,
        inputs: tuple[Tensor, ...],
        outputs: tuple[Tensor, ...],
        group: dist.ProcessGroup | None,
        watch: ActionWatch,
    ) -> None:
        super().__init__(module, index, count, device, input_args=inputs, output_args=outputs, group=group)
        self._module = module
        self._watch = watch

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self._module.microbatch = fwd_chunk_id
        with self._watch(self.stage_index, "F", fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        if self.is_last:  # by number: torch's own list has losses in the order of the forwards
            (loss,), _ = self.fwd_cache[bwd_chunk_id]
        with self._watch(self.stage_index, "B" if full_backward else "I", bwd_chunk_id):
            super().backward_one_chunk(
                bwd_chunk_id, loss=loss, full_backward=full_backward, last_backward=last_backward
            )
        if bwd_chunk_id in self.bwd_cache:  # gloo and NCCL send only what is contiguous
            self.bwd_cache[bwd_chunk_id] = tuple(
                None if gradient is None else gradient.contiguous() for gradient in self.bwd_cache[bwd_chunk_id]
            )

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        with self._watch(self.stage_index, "W", bwd_chunk_id):
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)

    def _validate_fwd_outputs(self, outputs: Any) -> None:
        """Up to torch 2.12: strides of dimensions of size 1 may differ, and shapes are known from the capture."""


class TorchOrder(_PipelineScheduleRuntime):
    """torch's runtime with the order of a plan. The last stage makes the loss, which is not for torch to keep."""

    def __init__(
        self,
        stages: Sequence[TorchStage],
        csv: str,
        *,
        microbatches: int,
        placement: Sequence[int],
        training: bool,
    ) -> None:
        """`csv` has a row of actions per rank, `placement` the rank of each stage. Without `training` the actions
        are forwards alone, which torch does not take for an order: it is given what it would have made of it."""
        super().__init__(  # type: ignore[no-untyped-call]
            list(stages), microbatches, loss_fn=_unused if training else None, scale_grads=False
        )
        _hide_tables()
        if training:
            with tempfile.TemporaryDirectory(prefix="bapipe-order-") as folder:
                path = Path(folder) / "order.csv"
                path.write_text(csv, encoding="ascii")
                self._load_csv(str(path))
            return
        ranks = dict(enumerate(placement))
        self.stage_index_to_group_rank = ranks
        for stage in stages:
            stage.stage_index_to_group_rank = ranks
        rows = [line.split(",") for line in csv.splitlines()]
        actions: Mapping[int, Any] = {
            rank: [_Action.from_str(text) for text in row] for rank, row in enumerate(rows)
        }
        self.pipeline_order_with_comms = _add_send_recv(
            dict(actions), stage_to_rank=lambda stage: ranks[stage], num_stages=len(ranks)
        )

    def run(self) -> None:
        """All actions of one global batch on this rank."""
        for stage in self._stages:
            stage.has_backward = self._has_backward
            stage.clear_runtime_states()
        self._step_microbatches(None, None, [None] * self._n_microbatches, None)
        for stage in self._stages:
            stage.clear_runtime_states()

    def _maybe_compute_loss(self, *args: Any, **kwargs: Any) -> None:
        """The last stage has made it."""

    def _maybe_get_loss(self, *args: Any, **kwargs: Any) -> None:
        """The stage has it by number."""


def _unused(*_: Any) -> Tensor:
    raise BaPipeError("torch asked for a loss that the last stage has made; use --engine bapipe, and report it")


class _NoTables(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno < logging.ERROR


_NO_TABLES = _NoTables()


def _hide_tables() -> None:
    """torch logs the whole order where an action fails; that is said in one line."""
    logging.getLogger(_PipelineScheduleRuntime.__module__).addFilter(_NO_TABLES)
