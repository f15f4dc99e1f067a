"""The same random numbers under any partition: each random node is seeded by step, micro-batch and its number."""

from __future__ import annotations

import contextlib
import hashlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

__all__ = ["Position", "seed_node", "seed_rng", "seed_whole", "seeded_by_place"]

Position = tuple[int, int]
"""(step, micro-batch)"""


def seed_rng(step: int, microbatch: int, node: int, device: torch.device | None = None) -> int:
    """Seed the default generator of a device (default: the CPU's) from a step, a micro-batch and a node's number.

    Whoever draws next draws the same numbers, however the model is cut. Returns the seed.
    """
    seed = _seed(f"{step}/{microbatch}/{node}")
    if device is not None and device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.default_generators[index].manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)
    return seed


@contextlib.contextmanager
def seeded_by_place(seed: int, path: str) -> Iterator[None]:
    """In here the CPU's generator draws what follows from the seed and a module's path alone; then it goes on as
    before."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_seed(f"{seed}/{path}"))
        yield


def _seed(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def seed_node(position: Position | None, node: int, example: Any) -> None:
    """Before a random node of a stage: seed the generator of the device that its first tensor lies on."""
    if position is not None:
        seed_rng(*position, node, example.device if isinstance(example, Tensor) else None)


def seed_whole(position: Position | None, node: int, example: Any) -> None:
    """As `seed_node`, and Python's and numpy's generators too."""
    if position is not None:
        seed = seed_rng(*position, node, example.device if isinstance(example, Tensor) else None)
        random.seed(seed)
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            numpy.random.seed(seed % 2**32)
