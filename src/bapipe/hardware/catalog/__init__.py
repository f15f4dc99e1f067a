"""The accelerators BaPipe knows by name, read from the TOML files of this folder.

Every figure names its source in `sources`; what no datasheet says (effective link rates, efficiencies) is marked
as an assumption there. A cluster file may define its own types instead.
"""

from __future__ import annotations

import functools
import importlib.resources
import tomllib

from bapipe.errors import BaPipeError, nearest
from bapipe.hardware.catalog.accelerator_types import TypeEntry, accelerator_type
from bapipe.hardware.cluster import AcceleratorType
from bapipe.io.decode import decode

__all__ = ["catalog_aliases", "find_type", "load_catalog"]


@functools.cache
def _entries() -> dict[str, TypeEntry]:
    entries: dict[str, TypeEntry] = {}
    for file in sorted(importlib.resources.files("bapipe.hardware.catalog").iterdir(), key=lambda item: item.name):
        if file.name.endswith(".toml"):
            for name, data in tomllib.loads(file.read_text(encoding="utf-8")).items():
                assert name not in entries, f"{name} is in the catalogue twice"
                entries[name] = decode(TypeEntry, data, where=f"catalogue: {name}")
    return entries


@functools.cache
def _types() -> dict[str, AcceleratorType]:
    return {name: accelerator_type(name, entry, where=f"catalogue: {name}") for name, entry in _entries().items()}


def load_catalog() -> dict[str, AcceleratorType]:
    """Every known accelerator type by its own name; aliases are in `catalog_aliases`."""
    return dict(_types())


def catalog_aliases() -> dict[str, str]:
    """Other name -> own name, such as v100 -> v100-16."""
    return {alias: name for name, entry in _entries().items() for alias in entry.aliases}


def find_type(name: str) -> AcceleratorType:
    """The type of that name or alias, in any case of letters."""
    aliases = catalog_aliases()
    key = name.strip().lower()
    own = aliases.get(key, key)
    if own not in _types():
        known = ", ".join(_types())
        raise BaPipeError(
            f"unknown accelerator '{name[:60]}'{nearest(name, [*_types(), *aliases])}; known are {known}, "
            "and a cluster file may define others in [types.NAME]"
        )
    return _types()[own]
