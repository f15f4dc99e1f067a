"""Measurements on disk, so that a second run goes on where the first stopped."""

from __future__ import annotations

import re
from pathlib import Path

from bapipe.errors import BaPipeError, FileFormatError
from bapipe.io.cache_folder import cache_folder
from bapipe.io.files import content_hash, dump_json, write_text
from bapipe.torch.profiler.measurement import Measurement, read_measurement

__all__ = ["cache_path", "load_measurement", "save_measurement"]


def cache_path(measured: Measurement, folder: Path | None = None) -> Path:
    """The file of all measurements with this model, input shapes, dtype, optimizer, device and torch version."""
    key = content_hash(
        [measured.fingerprint, measured.shapes, measured.dtype, measured.optimizer, measured.environment]
    )
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", f"{measured.model}-{measured.dtype}")[:60]
    return (folder or cache_folder()) / "profiles" / f"{name}-{key}.json"


def load_measurement(empty: Measurement, folder: Path | None = None) -> Measurement:
    """What the cache has for this key; `empty` itself where it has nothing that can be read."""
    path = cache_path(empty, folder)
    try:
        found = read_measurement(path)
    except FileFormatError:
        return empty
    same = (found.fingerprint, found.shapes, found.environment, found.layers, found.repeats) == (
        empty.fingerprint, empty.shapes, empty.environment, empty.layers, empty.repeats,
    )  # fmt: skip
    return found if same else empty


def save_measurement(measured: Measurement, folder: Path | None = None) -> Path:
    """Write the measurement whole, or leave what was there."""
    path = cache_path(measured, folder)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BaPipeError(f"the cache folder {path.parent} cannot be made: {error}; set BAPIPE_CACHE") from None
    write_text(path, dump_json(measured))
    return path
