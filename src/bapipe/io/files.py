"""TOML and JSON in and out: bounded, checked for what a hostile or cut-off file can hold, written atomically."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import tempfile
import tomllib
from pathlib import Path
from typing import Any, TypeVar

from bapipe.errors import FileFormatError
from bapipe.io.decode import decode
from bapipe.io.renamed_keys import first_name

__all__ = [
    "SIZE_LIMIT",
    "content_hash",
    "dump_json",
    "load_json",
    "load_toml",
    "parse_toml",
    "plain_values",
    "read_text",
    "read_versioned",
    "write_bytes",
    "write_text",
]

SIZE_LIMIT = 64 * 2**20
"""no plan, profile or schedule comes near this many bytes"""
T = TypeVar("T")


def read_text(path: str | Path) -> str:
    """The file's text; errors say what to do."""
    file = Path(path)
    try:
        if file.is_dir():
            raise FileFormatError(f"{path} is a folder; name a file")
        if file.stat().st_size > SIZE_LIMIT:
            raise FileFormatError(
                f"{path} has {file.stat().st_size} bytes, over the limit of {SIZE_LIMIT}; it cannot be such a file"
            )
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise FileFormatError(f"there is no file {str(path)[:200]}; check the path") from None
    except UnicodeDecodeError:
        raise FileFormatError(f"{path} is not text in UTF-8; is it the right file?") from None
    except (OSError, ValueError) as error:
        raise FileFormatError(f"{str(path)[:200]} cannot be read: {error}") from None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number BaPipe can use")


def load_json(path: str | Path) -> Any:
    """The JSON values of a file; NaN, infinities and absurd nesting are refused."""
    text = read_text(path)
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise FileFormatError(
            f"{path} is not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}; is it cut off?"
        ) from None
    except RecursionError:
        raise FileFormatError(f"{path} is nested too deeply; it cannot be such a file") from None
    except ValueError as error:
        raise FileFormatError(f"{path}: {error}") from None


def load_toml(path: str | Path) -> dict[str, Any]:
    """The values of a TOML file."""
    return parse_toml(read_text(path), where=str(path))


def parse_toml(text: str, *, where: str) -> dict[str, Any]:
    """The values of a TOML text; `where` says in messages where it comes from."""
    try:
        return tomllib.loads(text)
    except ValueError as error:  # TOMLDecodeError, or an integer of thousands of digits
        raise FileFormatError(f"{where} is not valid TOML: {error}") from None
    except RecursionError:
        raise FileFormatError(f"{where} is nested too deeply; it cannot be such a file") from None


def read_versioned(cls: type[T], path: str | Path, *, schema: str) -> T:
    """A JSON file whose `schema` entry must be the given one, decoded into `cls`."""
    data = load_json(path)
    if not isinstance(data, dict) or "schema" not in data:
        raise FileFormatError(f"{path} has no 'schema' entry; expected {schema}")
    found = data["schema"]
    if found != schema:
        kind = schema.split("/")[0]
        same_kind = str(found).split("/")[0] == kind
        todo = "make it again with this version of BaPipe" if same_kind else "give the right file"
        raise FileFormatError(f"{path} has schema '{str(found)[:60]}', expected '{schema}'; {todo}")
    return decode(cls, data, where=str(path))


def plain_values(value: Any) -> Any:
    """Dataclasses and tuples as the tables and lists that JSON has."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain_values(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, (tuple, list)):
        return [plain_values(item) for item in value]
    if isinstance(value, dict):
        return {str(key): plain_values(item) for key, item in value.items()}
    return value


def dump_json(value: Any) -> str:
    """JSON of plain values or dataclasses: the same value gives the same bytes."""
    return json.dumps(plain_values(value), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def content_hash(value: Any) -> str:
    """A short fingerprint of plain values or dataclasses.

    Fields that have their default are left out, so that a new optional field changes no fingerprint, and renamed
    ones have their first names.
    """
    text = json.dumps(_significant(value), sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _significant(value: Any) -> Any:
    """Plain values without what says nothing."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = ((field, getattr(value, field.name)) for field in dataclasses.fields(value))
        return {first_name(field.name): _significant(item) for field, item in fields if item != _default(field)}
    if isinstance(value, (tuple, list)):
        return [_significant(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _significant(item) for key, item in value.items()}
    return value


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def write_text(path: str | Path, text: str) -> None:
    """Write the whole file or nothing: a reader never sees half of it, and a failure keeps the old one."""
    try:
        data = text.encode()
    except UnicodeEncodeError as error:
        raise FileFormatError(f"{str(path)[:200]} cannot be written: {error}") from None
    write_bytes(path, data)


def write_bytes(path: str | Path, data: bytes) -> None:
    """As `write_text`, of bytes."""
    file = Path(path)
    try:
        handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name[:60]}-")
        try:
            with os.fdopen(handle, "wb") as stream:
                stream.write(data)
            umask = os.umask(0)
            os.umask(umask)
            os.chmod(temporary, 0o666 & ~umask)
            os.replace(temporary, file)
        except BaseException:
            os.unlink(temporary)
            raise
    except (OSError, ValueError) as error:
        raise FileFormatError(f"{str(path)[:200]} cannot be written: {error}") from None
