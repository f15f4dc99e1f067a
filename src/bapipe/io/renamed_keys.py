"""Keys of files that have another name now: the old names are read as well, the new ones are written.

Fingerprints are taken over the old names, so that a plan stays the plan of a run that was recorded before.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from bapipe.errors import FileFormatError

__all__ = ["RENAMED_KEYS", "first_name", "with_new_names"]

RENAMED_KEYS = {
    "features": "activations",
    "minibatch": "global_batch",
    "part_stash": "part_saved_activations",
    "peak_features": "in_flight",
    "peak_live": "peak_in_flight",
    "rivals": "alternatives",
    "stash": "saved_activations",
    "stash_bytes": "saved_bytes",
    "stash_elements": "saved_elements",
}
"""old name -> the name now, each of them once"""
_FIRST_NAMES = {new: old for old, new in RENAMED_KEYS.items()}


def first_name(name: str) -> str:
    """The name under which a field was first written."""
    return _FIRST_NAMES.get(name, name)


def with_new_names(data: Mapping[Any, Any], names: Collection[str], *, where: str) -> dict[Any, Any]:
    """A table of a file with its old keys renamed, as far as `names`, the fields that it may have, lack them."""
    renamed = {}
    for key, value in data.items():
        new = RENAMED_KEYS.get(key) if key not in names else None
        if new in names:
            if new in data:
                raise FileFormatError(f"{where}: '{key}' is the old name of '{new}'; keep one of them")
            key = new
        renamed[key] = value
    return renamed
