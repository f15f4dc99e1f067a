"""Where BaPipe keeps files of its own. Imports no torch."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["cache_folder"]


def cache_folder() -> Path:
    """$BAPIPE_CACHE, or bapipe under the user's cache folder."""
    own = os.environ.get("BAPIPE_CACHE")
    if own:
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "bapipe"
