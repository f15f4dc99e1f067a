"""How many examples a property is tried on: half of them usually, all by `scripts/test --full`."""

from __future__ import annotations

import os

__all__ = ["examples"]


def examples(count: int) -> int:
    """`count` where all tests run, half as many else."""
    return count if os.environ.get("BAPIPE_TESTS") == "full" else -(-count // 2)
