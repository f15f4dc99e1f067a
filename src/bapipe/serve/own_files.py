"""The folder whose files a page may name: profiles, layer tables, PipeDream's graphs and clusters.

A name is looked up in the folder's list and never made into a path, so `..`, absolute paths and links that lead
out of the folder name nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bapipe.errors import BaPipeError, nearest
from bapipe.io.files import SIZE_LIMIT
from bapipe.models.builtin import BUILTIN_NAMES, is_builtin
from bapipe.serve.question import LONGEST_TEXT, Question

__all__ = ["MOST_FILES", "OwnFile", "files_of", "list_folder"]

MOST_FILES = 500
"""files of a folder that are looked at"""
_SCHEMA = re.compile(rb"""["']?schema["']?\s*[:=]\s*["']bapipe\.(\w+)/""")
_HEAD = 4096
"""bytes in which a file must say what it is"""
_KINDS: dict[str, dict[bytes, Literal["model", "cluster"]]] = {
    ".json": {b"profile": "model"},
    ".toml": {b"layers": "model", b"cluster": "cluster"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnFile:
    """A file that may be named."""

    name: str
    kind: Literal["model", "cluster"]
    stamp: tuple[int, int]
    """time of its last change in ns, and size: another one is another file"""


def list_folder(folder: Path | None) -> tuple[OwnFile, ...]:
    """The models and clusters right inside the folder, by name; what cannot be read is left out."""
    if folder is None:
        return ()
    try:
        names = sorted(entry.name for entry in folder.iterdir())[:MOST_FILES]
    except OSError as error:
        raise BaPipeError(f"the folder {folder} cannot be read: {error}; name another with --folder") from None
    found = (_look(folder, name) for name in names)
    return tuple(file for file in found if file is not None)


def _look(folder: Path, name: str) -> OwnFile | None:
    # A name that begins with a dash would be an option of the command, and a hidden file is not meant.
    if name.startswith(("-", ".")) or not name.isprintable() or name != name.strip() or len(name) > LONGEST_TEXT:
        return None
    try:
        path = (folder / name).resolve(strict=True)
        status = path.stat()
        if not path.is_relative_to(folder.resolve()) or not path.is_file() or status.st_size > SIZE_LIMIT:
            return None
        kind: Literal["model", "cluster"] | None
        if name.lower().endswith(".graph.txt"):
            kind = "model"
        else:
            with path.open("rb") as stream:
                schema = _SCHEMA.search(stream.read(_HEAD))
            kind = _KINDS.get(path.suffix.lower(), {}).get(schema[1]) if schema else None
    except (OSError, ValueError, RuntimeError):  # RuntimeError: a loop of links
        return None
    return None if kind is None else OwnFile(name=name, kind=kind, stamp=(status.st_mtime_ns, status.st_size))


def files_of(question: Question, listed: tuple[OwnFile, ...]) -> tuple[OwnFile, ...]:
    """The files that the question names; BaPipeError for a name that is neither built in nor in the list."""
    own = {(file.kind, file.name): file for file in listed}
    models = [file.name for file in listed if file.kind == "model"]
    clusters = [file.name for file in listed if file.kind == "cluster"]
    found = []
    if not is_builtin(question.model):
        if ("model", question.model) not in own:
            known = [*BUILTIN_NAMES, *models]
            raise BaPipeError(
                f"unknown model '{question.model[:60]}'{nearest(question.model, known)}; choose a built-in one or "
                "a profile, layer table or graph of the folder that `bapipe serve --folder` names"
            )
        found.append(own["model", question.model])
    if question.cluster.lower().endswith(".toml") or "/" in question.cluster or "\\" in question.cluster:
        if ("cluster", question.cluster) not in own:
            raise BaPipeError(
                f"unknown cluster '{question.cluster[:60]}'{nearest(question.cluster, clusters)}; write one such "
                "as 4xv100 or choose a cluster file of the folder that `bapipe serve --folder` names"
            )
        found.append(own["cluster", question.cluster])
    return tuple(found)
