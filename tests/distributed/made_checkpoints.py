"""Folders that look like checkpoints, without a training. Imports no torch."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from bapipe.models.layers import ModelRef
from bapipe.torch.checkpoint.checkpoint_folder import begin_checkpoint, commit_checkpoint
from bapipe.torch.checkpoint.checkpoint_manifest import MANIFEST, METADATA, SMALL_STATE, Manifest, SavedFile

__all__ = ["made", "names", "of_schema", "signed"]


def made(folder: Path, step: int) -> Path:
    """A complete checkpoint of files that hold no tensors."""
    partial = begin_checkpoint(folder, step)
    files = {"weights": b"12345", METADATA: b"none", SMALL_STATE: b"none"}
    for name, content in files.items():
        (partial / name).write_bytes(content)
    manifest = Manifest(
        step=step,
        model=ModelRef(name="any"),
        saved_under="a test",
        global_batch=4,
        microbatch_size=2,
        saved=(),
        tensors="0" * 64,
        files={
            name: SavedFile(size=len(content), sha256=hashlib.sha256(content).hexdigest())
            for name, content in files.items()
        },
        torch="2",
    )
    return commit_checkpoint(partial, manifest)


def of_schema(checkpoint: Path, schema: str) -> None:
    """Make a checkpoint one that another version could have written: all is right but the schema."""
    data = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))
    data["schema"], data["new"] = schema, True
    signed(checkpoint, data)


def signed(checkpoint: Path, manifest: dict[str, Any] | None = None) -> None:
    """Write a manifest, by default the one that is there, with the checksums of the files and of itself."""
    path = checkpoint / MANIFEST
    data = manifest or json.loads(path.read_text(encoding="utf-8"))
    data.pop("sha256", None)
    for name in data["files"]:
        content = (checkpoint / name).read_bytes()
        data["files"][name] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    data["sha256"] = hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps(data), encoding="utf-8")


def names(folder: Path) -> list[str]:
    """What is in a folder, but the lock."""
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")
