"""TOML and JSON in and out: bounded, checked for what a hostile or cut-off file can hold, written atomically."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
import tempfile
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from bapipe.errors import BaPipeError, FileFormatError
from bapipe.io.decode import decode
from bapipe.io.renamed_keys import first_name

__all__ = [
    "SIZE_LIMIT",
    "check_output",
    "content_hash",
    "dump_json",
    "load_json",
    "load_toml",
    "parse_toml",
    "parse_versioned",
    "plain_values",
    "read_text",
    "read_versioned",
    "replace_file",
    "sync",
    "toml_string",
    "unless_default",
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
    raise ValueError(f"{name} is not a number BaPipe can use; correct it")


def _table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """One table of a JSON text: readers would take the last of two values of one key and say nothing."""
    table = dict(pairs)
    if len(table) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key '{twice[:60]}' is there twice in one table; keep one of them")
    return table


def load_json(path: str | Path) -> Any:
    """The JSON values of a file; NaN, infinities, absurd nesting, a key twice and half characters are refused."""
    return _parse_json(read_text(path), where=path)


def _parse_json(text: str, *, where: str | Path) -> Any:
    try:
        values = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_table)
        if "\\u" in text:
            json.dumps(values, ensure_ascii=False).encode()
        return values
    except UnicodeEncodeError:
        raise FileFormatError(
            f"{where} has half of a pair of UTF-16 code units (\\ud800 to \\udfff), no character; correct it"
        ) from None
    except json.JSONDecodeError as error:
        raise FileFormatError(
            f"{where} is not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}; is it cut off?"
        ) from None
    except RecursionError:
        raise FileFormatError(f"{where} is nested too deeply; it cannot be such a file") from None
    except ValueError as error:
        raise FileFormatError(f"{where}: {error}") from None


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


_KINDS = {
    "bapipe.cluster": ("a cluster", "bapipe cluster detect -o writes one"),
    "bapipe.layers": ("a layer table", "docs/reference/layer-table.md says how to write one"),
    "bapipe.plan": ("a plan", "bapipe plan --out writes one"),
    "bapipe.profile": ("a profile", "bapipe profile -o writes one"),
    "bapipe.run": ("the record of a run", "bapipe run --out writes one"),
    "bapipe.schedule": ("a schedule", "bapipe simulate --out writes one"),
}
"""schema -> what such a file is, and where one comes from"""


def _other_kind(found: str, wanted: str) -> str:
    """What to do about a file of another kind than is wanted."""
    is_, _ = _KINDS.get(found.split("/")[0], ("", ""))
    want, source = _KINDS.get(wanted.split("/")[0], ("", ""))
    if not is_ or not want:
        return "give the right file"
    return f"it is {is_}, give {want} here ({source})"


def toml_string(value: str) -> str:
    """The text as TOML writes it: a basic string is JSON's, but for DEL, which TOML wants escaped."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def read_versioned(
    cls: type[T], path: str | Path, *, schema: str, check: Callable[[T], object] | None = None
) -> T:
    """A JSON file whose `schema` entry must be the given one, decoded into `cls`, which `check` may refuse."""
    return parse_versioned(cls, read_text(path), schema=schema, where=str(path), check=check)


def parse_versioned(
    cls: type[T], text: str, *, schema: str, where: str, check: Callable[[T], object] | None = None
) -> T:
    """As `read_versioned`, of a text; `where` says in messages where it comes from."""
    data = _parse_json(text, where=where)
    if not isinstance(data, dict) or "schema" not in data:
        raise FileFormatError(f"{where} has no 'schema' entry; expected {schema}")
    found = data["schema"]
    if found != schema:
        kind = schema.split("/")[0]
        same_kind = str(found).split("/")[0] == kind
        todo = "make it again with this version of BaPipe" if same_kind else _other_kind(str(found), schema)
        raise FileFormatError(f"{where} has schema '{str(found)[:60]}', expected '{schema}'; {todo}")
    try:
        value = decode(cls, data, where=where)
        if check is not None:
            check(value)
    except BaPipeError as error:
        said = str(error)
        raise FileFormatError(said if said.startswith(where) else f"{where[:200]}: {said}") from None
    return value


_UNLESS_DEFAULT = "unless default"


def unless_default(default: Any) -> Any:
    """A field of a dataclass that a file has only where it differs from its default."""
    return dataclasses.field(default=default, metadata={_UNLESS_DEFAULT: True})


def plain_values(value: Any) -> Any:
    """Dataclasses and tuples as the tables and lists that JSON has."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = ((field, getattr(value, field.name)) for field in dataclasses.fields(value))
        return {
            field.name: plain_values(item)
            for field, item in fields
            if not (_UNLESS_DEFAULT in field.metadata and item == field.default)
        }
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


def write_text(path: str | Path, text: str, *, durable: bool = True) -> None:
    """Write the whole file or nothing: a reader never sees half of it, and a failure keeps the old one.

    When this returns the file is on disk, under its name: a power cut later does not lose it. Without `durable`
    the system writes it when it likes, which is enough for what nobody reads after a restart.
    """
    try:
        data = text.encode()
    except UnicodeEncodeError as error:
        raise FileFormatError(f"{str(path)[:200]} cannot be written: {error}") from None
    write_bytes(path, data, durable=durable)


def write_bytes(path: str | Path, data: bytes, *, durable: bool = True) -> None:
    """As `write_text`, of bytes."""

    def write(temporary: Path) -> None:
        temporary.write_bytes(data)

    try:
        replace_file(path, write, durable=durable)
    except (OSError, ValueError) as error:
        check_output(path)
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise FileFormatError(f"{str(path)[:200]} cannot be written: {reason}") from None


def check_output(path: str | Path | None) -> None:
    """Refuse a file to write whose folder is missing, before anything is computed for it."""
    try:
        known = path is None or Path(path).resolve().parent.is_dir()
    except (OSError, ValueError):
        return  # the name itself is wrong, which writing says
    if not known:
        raise FileFormatError(
            f"{str(path)[:200]} cannot be written: it is in a folder that does not exist; make it first"
        )


def replace_file(path: str | Path, write: Callable[[Path], None], *, durable: bool = True) -> None:
    """Have `write` fill a new file beside `path`, and give it that name once all of it is there.

    What was at `path` stays as it was where `write` or the disk fails: its error is raised, and nothing is left
    behind. Otherwise as `write_text`.
    """
    file = Path(path)
    handle, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name[:60]}-")
    os.close(handle)
    temporary = Path(name)
    try:
        write(temporary)
        if durable:
            sync(temporary)
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)
        os.replace(temporary, file)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        sync(file.parent)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on disk.

    Where the file system cannot sync a folder, or the folder may not be read, there is nothing to wait for; any
    other error is the system's OSError.
    """
    try:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EACCES):
            raise
