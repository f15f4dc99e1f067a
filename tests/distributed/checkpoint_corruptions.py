"""Ways in which a checkpoint comes to harm: on the disk, in a copy, or by hand. Imports no torch."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["KINDS", "corrupt"]

MANIFEST = "checkpoint.json"
Corruption = Callable[[random.Random, Path, list[Path]], str]


def corrupt(chance: random.Random, checkpoint: Path, others: list[Path], kind: str | None = None) -> str:
    """Do harm to a checkpoint, by chance; `others` are of other steps and runs. Returns what was done.

    What is done may leave all values as they were, but some file of the checkpoint does not stay as it was. The
    `kind` is one of `KINDS`; None: any.
    """
    while True:
        before = _content(checkpoint)
        done = KINDS[kind or chance.choice(list(KINDS))](chance, checkpoint, others)
        if _content(checkpoint) != before:
            return done


def _content(folder: Path) -> dict[str, bytes | int | None]:
    if not folder.stat().st_mode & 0o400:
        return {}
    return {path.name: _bytes(path) for path in folder.iterdir()}


def _bytes(path: Path) -> bytes | int | None:
    if not path.is_file() or path.is_symlink():
        return None
    mode = path.stat().st_mode
    return path.read_bytes() if mode & 0o400 else mode


def _any(chance: random.Random, folder: Path) -> Path:
    return chance.choice(sorted(folder.iterdir()))


def _flip(chance: random.Random, folder: Path, others: list[Path], *, bits: int = 1) -> str:  # noqa: ARG001
    file = _any(chance, folder)
    data = bytearray(file.read_bytes())
    for _ in range(bits):
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    file.write_bytes(data)
    return f"{bits} bits of {file.name}"


def _flip_some(chance: random.Random, folder: Path, others: list[Path]) -> str:
    return _flip(chance, folder, others, bits=chance.randrange(2, 40))


def _cut_off(chance: random.Random, folder: Path, others: list[Path]) -> str:  # noqa: ARG001
    file = _any(chance, folder)
    length = chance.choice([0, chance.randrange(file.stat().st_size)])
    os.truncate(file, length)
    return f"{file.name} cut off after {length} bytes"


def _longer(chance: random.Random, folder: Path, others: list[Path]) -> str:  # noqa: ARG001
    file = _any(chance, folder)
    with file.open("ab") as stream:
        stream.write(chance.randbytes(chance.randrange(1, 600)))
    return f"{file.name} grew"


def _block(chance: random.Random, folder: Path, others: list[Path]) -> str:  # noqa: ARG001
    """As a bad sector, or a page that was never written."""
    file = _any(chance, folder)
    data = bytearray(file.read_bytes())
    start = chance.randrange(len(data)) // 512 * 512
    size = len(data[start : start + 512])
    data[start : start + 512] = chance.choice([bytes(size), chance.randbytes(size)])
    file.write_bytes(data)
    return f"512 bytes of {file.name} at {start}"


def _moved_block(chance: random.Random, folder: Path, others: list[Path]) -> str:  # noqa: ARG001
    file = _any(chance, folder)
    data = bytearray(file.read_bytes())
    first, second = (chance.randrange(len(data) + 1) // 256 * 256 for _ in range(2))
    size = min(256, len(data) - max(first, second))
    data[first : first + size], data[second : second + size] = (
        data[second : second + size],
        data[first : first + size],
    )
    file.write_bytes(data)
    return f"bytes of {file.name} at {first} and {second} swapped"


def _swapped(chance: random.Random, folder: Path, others: list[Path]) -> str:  # noqa: ARG001
    first, second = chance.sample(sorted(folder.iterdir()), 2)
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)
    return f"{first.name} and {second.name} swapped"


def _copied(chance: random.Random, folder: Path, others: list[Path]) -> str:
    """Valid files, but of another step or run; one that differs stays, or it were a whole checkpoint."""
    other = chance.choice(others)
    names = sorted(path.name for path in folder.iterdir())
    chosen = chance.sample(names, chance.randrange(1, len(names)))
    differing = [name for name in names if (other / name).read_bytes() != (folder / name).read_bytes()]
    if not differing:
        return _flip(chance, folder, others)
    if set(differing) <= set(chosen):
        chosen.remove(differing[0])
    for name in chosen:
        shutil.copyfile(other / name, folder / name)
    return f"{', '.join(chosen)} of {other.parent.name}/{other.name}"


def _copied_whole(chance: random.Random, folder: Path, others: list[Path]) -> str:
    """A complete checkpoint of another step, under this one's name."""
    other = chance.choice([path for path in others if path.name != folder.name])
    for path in other.iterdir():
        shutil.copyfile(path, folder / path.name)
    return f"all of {other.parent.name}/{other.name}"


def _odd(chance: random.Random, folder: Path, others: list[Path]) -> str:  # noqa: ARG001
    """Something that is no file in a file's place."""
    file = _any(chance, folder)
    file.unlink()
    how = chance.choice(["nothing", "folder", "loop", "pipe", "dangling"])
    if how == "folder":
        file.mkdir()
    elif how == "loop":
        file.symlink_to(file.name)
    elif how == "pipe":
        os.mkfifo(file)
    elif how == "dangling":
        file.symlink_to("nowhere")
    return f"{how} instead of {file.name}"


def _edited(chance: random.Random, folder: Path, others: list[Path]) -> str:  # noqa: ARG001
    """Another value somewhere in the manifest; it stays valid JSON."""
    path = folder / MANIFEST
    data = json.loads(path.read_text(encoding="utf-8"))
    places: list[tuple[Any, Any]] = []

    def collect(value: Any) -> None:
        for key in value if isinstance(value, dict) else range(len(value)):
            places.append((value, key))
            if isinstance(value[key], (dict, list)):
                collect(value[key])

    collect(data)
    holder, key = chance.choice(places)
    new = chance.choice(
        [None, 0, -1, 5, 2**62, 10**400, 1.5, True, "", "x", "../x", "a\0b", [], {}, [None], {"x": 1}, "delete"]
    )
    if new == "delete":
        del holder[key]
    elif isinstance(holder[key], int) and chance.random() < 0.5:
        holder[key] += 1
    else:
        holder[key] = new
    path.write_text(json.dumps(data, indent=1), encoding="utf-8")
    return f"{key} edited in the manifest"


def _renamed(chance: random.Random, folder: Path, others: list[Path]) -> str:  # noqa: ARG001
    """A tensor's name that stands for another one."""
    path = folder / MANIFEST
    data = json.loads(path.read_text(encoding="utf-8"))
    data["aliases"] = {"layer0.0.weight": chance.choice(["layer1.0.weight", "layer0.0.bias", "missing"])}
    path.write_text(json.dumps(data, indent=1), encoding="utf-8")
    return "an alias edited in the manifest"


def _stripped(chance: random.Random, folder: Path, others: list[Path]) -> str:  # noqa: ARG001
    """The manifest rewritten as one of the schema that had no checksums, over files that came to harm."""
    path = folder / MANIFEST
    pieces = sorted(item for item in folder.iterdir() if item.suffix == ".distcp")
    piece = chance.choice(pieces)
    data = bytearray(piece.read_bytes())
    for _ in range(20):
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    piece.write_bytes(data)
    manifest = json.loads(path.read_text(encoding="utf-8"))
    known = ("step", "model", "saved_under", "global_batch", "microbatch_size", "saved", "aliases", "torch")
    old = {name: manifest[name] for name in known if name in manifest}
    sizes = {item.name: item.stat().st_size for item in sorted(folder.iterdir()) if item.name != MANIFEST}
    old = {"schema": "bapipe.checkpoint/1", **old, "files": sizes}
    path.write_text(json.dumps(old, indent=1), encoding="utf-8")
    return f"no checksums, and {piece.name} has other bits"


def _garbage(chance: random.Random, folder: Path, others: list[Path]) -> str:  # noqa: ARG001
    """A manifest that is none."""
    texts = [b"", b"[]", b"{}", b"null", b"[" * 20_000, b"\xff\xfe", b'{"schema": NaN}', b"9" * 5_000]
    texts += [
        b'{"schema": "bapipe.checkpoint/99"}',
        b'{"schema": ["bapipe.checkpoint/2"]}',
        b'{"schema": "\\ud800"}',
    ]
    text = chance.choice(texts)
    (folder / MANIFEST).write_bytes(text)
    return f"the manifest is {text[:30]!r}"


def _misnamed(chance: random.Random, folder: Path, others: list[Path]) -> str:  # noqa: ARG001
    """A file under another name: a copy's suffix, another case, or another file's name."""
    file = _any(chance, folder)
    name = chance.choice([f"{file.name}.bak", file.name.upper(), f"{file.name} (1)", _any(chance, folder).name])
    file.rename(folder / name)
    return f"{file.name} renamed to {name}"


def _empty(chance: random.Random, folder: Path, others: list[Path]) -> str:  # noqa: ARG001
    """All files, or some, without a byte, as a disk that was full leaves them."""
    files = sorted(folder.iterdir())
    chosen = chance.choice([files, chance.sample(files, chance.randrange(1, len(files)))])
    for file in chosen:
        os.truncate(file, 0)
    return f"{len(chosen)} files emptied"


def _missing(chance: random.Random, folder: Path, others: list[Path]) -> str:  # noqa: ARG001
    files = sorted(folder.iterdir())
    chosen = chance.sample(files, chance.randrange(1, len(files) + 1))
    for file in chosen:
        file.unlink()
    return f"{', '.join(file.name for file in chosen)} removed"


def _forbidden(chance: random.Random, folder: Path, others: list[Path]) -> str:  # noqa: ARG001
    """A file, or the folder, that may not be read; root may all the same, unless it gives that up."""
    target = chance.choice([_any(chance, folder), folder])
    target.chmod(0)
    return f"{target.name} may not be read"


def _newer(chance: random.Random, folder: Path, others: list[Path]) -> str:  # noqa: ARG001
    """All is right but the schema, of the checkpoint or of the record of its training."""
    path = folder / MANIFEST
    data = json.loads(path.read_text(encoding="utf-8"))
    record = folder / "training.json"
    if chance.random() < 0.5 and record.exists():
        text = record.read_text(encoding="utf-8").replace("bapipe.training/1", "bapipe.training/9")
        record.write_text(text, encoding="utf-8")
        content = text.encode()
        data["files"][record.name] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        done = "a newer schema of training.json"
    else:
        data["schema"], done = f"bapipe.checkpoint/{chance.randrange(3, 99)}", "a newer schema of the manifest"
    data.pop("sha256", None)
    data["sha256"] = hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps(data, indent=1), encoding="utf-8")
    return done


def _record_edited(chance: random.Random, folder: Path, others: list[Path]) -> str:
    """What the checkpoint says of its training, edited by hand."""
    path = folder / "training.json"
    if not path.exists():
        return _garbage(chance, folder, others)
    text = path.read_text(encoding="utf-8")
    edit = chance.choice([("aten.tanh", "aten.relu"), ("Adam", "SGD"), ('"fp32"', '"bf16"'), ("0.001", "0.01")])
    path.write_text(text.replace(*edit), encoding="utf-8")
    return f"{edit[0]} is {edit[1]} in training.json"


KINDS: dict[str, Corruption] = {
    "bit": _flip,
    "bits": _flip_some,
    "cut off": _cut_off,
    "longer": _longer,
    "block": _block,
    "moved block": _moved_block,
    "swapped": _swapped,
    "copied": _copied,
    "copied whole": _copied_whole,
    "no file": _odd,
    "edited": _edited,
    "alias": _renamed,
    "stripped": _stripped,
    "garbage": _garbage,
    "renamed": _misnamed,
    "empty": _empty,
    "missing": _missing,
    "forbidden": _forbidden,
    "newer schema": _newer,
    "edited record": _record_edited,
}
