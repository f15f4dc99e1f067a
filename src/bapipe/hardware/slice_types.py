"""How the types of GPU slices are named: the GPU's type and the slice's share, such as h200-25pct."""

from __future__ import annotations

import re

__all__ = ["slice_share", "slice_type"]


def slice_type(gpu: str, percentage: float | str) -> str:
    """The type of a slice with that percentage of a GPU's multiprocessors."""
    return f"{gpu}-{percentage}pct"


def slice_share(name: str) -> float | None:
    """The percentage that a slice of that type has of its GPU; None for the type of a whole accelerator."""
    found = re.search(r"-(\d+(?:\.\d+)?)pct$", name)
    return float(found[1]) if found else None
