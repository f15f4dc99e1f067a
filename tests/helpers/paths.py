"""Where things lie."""

from __future__ import annotations

from pathlib import Path

__all__ = ["REPOSITORY"]

REPOSITORY = Path(__file__).parents[2]
