"""What the model returns in an evaluation, from the ranks of the last stage to those that want it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from bapipe.errors import BaPipeError
from bapipe.torch.capturing.torch_internals import flatten
from bapipe.torch.comm import TensorShape

__all__ = ["Evaluated", "OnOutput", "OutputsOn", "gather_outputs", "joined_outputs", "wanted_ranks"]

OutputsOn = Literal["all"] | int
"""the ranks that want outputs: all, or one by its number"""
OnOutput = Callable[[int, Any], None]
"""called with a micro-batch and what the model returns for it, on the rank that computes it"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Evaluated:
    """What an evaluation of one global batch found."""

    loss: float | None
    """None where no targets were given to a loss that takes them"""
    outputs: Any
    """what the model returns for the whole global batch, in host memory; None on ranks that did not want it"""


def wanted_ranks(outputs: OutputsOn, world: int) -> tuple[int, ...]:
    """The ranks that want outputs."""
    if outputs == "all":
        return tuple(range(world))
    if isinstance(outputs, int) and not isinstance(outputs, bool) and 0 <= outputs < world:
        return (outputs,)
    raise BaPipeError(f'outputs is "all" or a rank from 0 to {world - 1}, got {outputs!r}; give one of them')


def gather_outputs(
    made: Mapping[int, Any], makers: Sequence[int], wanted: Sequence[int]
) -> list[list[Any]] | None:
    """Each micro-batch's leaves on the ranks that want them, in host memory; None elsewhere. Collective.

    `made` are this rank's, `makers` the rank that makes each.
    """
    rank = dist.get_rank()
    own = {number: [_to_host(leaf) for leaf in flatten(output)[0]] for number, output in made.items()}
    described = {number: [_described(leaf) for leaf in leaves] for number, leaves in own.items()}
    everywhere: list[dict[int, list[Any]]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everywhere, described)
    found: list[list[Any]] = []
    for number, maker in enumerate(makers):
        leaves = []
        for index, about in enumerate(everywhere[maker][number]):
            mine = own[number][index] if rank == maker else None
            leaves.append(_move(mine, about, maker, wanted, rank) if isinstance(about, TensorShape) else about)
        found.append(leaves)
    return found if rank in wanted else None


def _to_host(leaf: Any) -> Any:
    return leaf.detach().cpu().contiguous() if isinstance(leaf, Tensor) else leaf


def _described(leaf: Any) -> Any:
    return TensorShape(shape=tuple(leaf.shape), dtype=leaf.dtype) if isinstance(leaf, Tensor) else leaf


def _move(mine: Tensor | None, about: TensorShape, maker: int, wanted: Sequence[int], rank: int) -> Tensor | None:
    """A tensor from its maker to those that want it."""
    others = [item for item in wanted if item != maker]
    if not others or (rank != maker and rank not in others):
        return mine
    tensor = torch.empty(about.shape, dtype=about.dtype) if mine is None else mine
    # As bytes: gloo has no sums of every dtype, but moves any.
    flat = tensor.reshape(-1).view(torch.uint8) if tensor.numel() else tensor.new_empty(0, dtype=torch.uint8)
    if not flat.numel():
        return tensor
    if len(wanted) > 1:
        dist.broadcast(flat, maker)
    elif rank == maker:
        dist.send(flat, others[0])
    else:
        dist.recv(flat, maker)
    return tensor


def joined_outputs(
    parts: Sequence[Sequence[Any]],
    sample_dims: Sequence[int | None],
    loss: tuple[int, float] | None,
) -> list[Any]:
    """The leaves of the whole global batch from those of its micro-batches.

    A tensor with a dimension that counts samples is joined along it. `loss` is the place of the model's own loss
    and its value for the whole. Of anything else there is one value if it is the same for all, else a tuple with
    each micro-batch's.
    """
    joined: list[Any] = []
    for index, pieces in enumerate(zip(*parts, strict=True)):
        first, dim = pieces[0], sample_dims[index]
        if loss is not None and index == loss[0] and isinstance(first, Tensor):
            joined.append(torch.tensor(loss[1], dtype=first.dtype))
        elif isinstance(first, Tensor) and dim is not None:
            joined.append(torch.cat(pieces, dim))
        elif isinstance(first, Tensor):
            same = all(torch.equal(first, piece) for piece in pieces[1:])
            joined.append(first if same else pieces)
        else:
            joined.append(first if all(piece == first for piece in pieces) else pieces)
    return joined
