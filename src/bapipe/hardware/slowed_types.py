"""Names of accelerator types that were found slower than others of their kind: slow-2.5x-h200, of h200."""

from __future__ import annotations

import re

__all__ = ["slowed_type", "usual_type"]

_NAME = re.compile(r"slow-([0-9.]+)x-(.+)")


def slowed_type(name: str, factor: float) -> str:
    """The type of an accelerator that takes so many times as long as one of type `name`, itself slowed or not."""
    found = _NAME.fullmatch(name)
    before, usual = (float(found[1]), found[2]) if found else (1.0, name)
    return f"slow-{before * factor:.2f}x-{usual}"


def usual_type(name: str) -> str:
    """The type that an accelerator has by its making."""
    found = _NAME.fullmatch(name)
    return found[2] if found else name
