"""Files in and out: bounded, strict, and written whole or not at all."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from bapipe.errors import FileFormatError
from bapipe.io.files import content_hash, dump_json, load_json, load_toml, read_text, read_versioned, write_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    schema: str = "bapipe.note/1"
    text: str
    numbers: tuple[float, ...] = ()


class TestWrite:
    def test_writes(self, tmp_path: Path) -> None:
        write_text(tmp_path / "a.txt", "λ\n")
        assert (tmp_path / "a.txt").read_text(encoding="utf-8") == "λ\n"
        assert os.listdir(tmp_path) == ["a.txt"]

    def test_mode_follows_the_umask(self, tmp_path: Path) -> None:
        before = os.umask(0o027)
        try:
            write_text(tmp_path / "a.txt", "x")
        finally:
            os.umask(before)
        assert (tmp_path / "a.txt").stat().st_mode & 0o777 == 0o640

    def test_a_failure_keeps_the_old_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = tmp_path / "a.txt"
        write_text(path, "old")

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "replace", full)
        with pytest.raises(FileFormatError, match=r"a\.txt cannot be written: .*No space left"):
            write_text(path, "new")
        assert path.read_text() == "old"
        assert os.listdir(tmp_path) == ["a.txt"]

    def test_a_file_is_on_disk_before_it_has_its_name_and_the_name_before_the_end(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path, done = tmp_path / "a.txt", []
        fsync, replace = os.fsync, os.replace

        def synced(handle: int) -> None:
            file = os.readlink(f"/proc/self/fd/{handle}")
            done.append("folder" if file == str(tmp_path) else f"file of {os.path.getsize(file)} bytes")
            fsync(handle)

        def replaced(*names: str) -> None:
            done.append("named")
            replace(*names)

        monkeypatch.setattr(os, "fsync", synced)
        monkeypatch.setattr(os, "replace", replaced)
        write_text(path, "12345")
        assert done == ["file of 5 bytes", "named", "folder"]
        write_text(path, "1", durable=False)
        assert done[3:] == ["named"]

    def test_a_disk_that_fails_to_sync_keeps_the_old_file(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "a.txt"
        write_text(path, "old")

        def broken(_: int) -> None:
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(os, "fsync", broken)
        with pytest.raises(FileFormatError, match="Input/output error"):
            write_text(path, "new")
        assert path.read_text() == "old"
        assert os.listdir(tmp_path) == ["a.txt"]

    def test_text_that_cannot_be_encoded_keeps_the_old_file(self, tmp_path: Path) -> None:
        path = tmp_path / "a.txt"
        write_text(path, "old")
        with pytest.raises(FileFormatError, match="cannot be written"):
            write_text(path, "new" * 100_000 + "\ud800")
        assert path.read_text() == "old"
        assert os.listdir(tmp_path) == ["a.txt"]

    @pytest.mark.parametrize("name", ["missing/a.txt", "a\0b", "x" * 300])
    def test_no_such_place(self, tmp_path: Path, name: str) -> None:
        with pytest.raises(FileFormatError, match="cannot be written"):
            write_text(tmp_path / name, "x")
        assert os.listdir(tmp_path) == []

    def test_onto_a_folder(self, tmp_path: Path) -> None:
        (tmp_path / "folder").mkdir()
        with pytest.raises(FileFormatError, match="cannot be written"):
            write_text(tmp_path / "folder", "x")
        assert os.listdir(tmp_path) == ["folder"]


class TestRead:
    def test_missing_folder_binary(self, tmp_path: Path) -> None:
        with pytest.raises(FileFormatError, match="there is no file"):
            read_text(tmp_path / "none")
        with pytest.raises(FileFormatError, match="is a folder"):
            read_text(tmp_path)
        (tmp_path / "b").write_bytes(b"\xff\xfe\x00")
        with pytest.raises(FileFormatError, match="not text in UTF-8"):
            read_text(tmp_path / "b")
        with pytest.raises(FileFormatError, match="cannot be read"):
            read_text("a\0b")

    def test_json(self, tmp_path: Path) -> None:
        path = tmp_path / "a.json"
        write_text(path, '{"a": [1, 2.5, null, true]}')
        assert load_json(path) == {"a": [1, 2.5, None, True]}
        for text, message in (
            ("{", "not valid JSON"),
            ("[NaN]", "NaN is not a number"),
            ("[-Infinity]", "-Infinity is not a number"),
            ("[" * 100_000, "nested too deeply"),
            ("9" * 5000, "limit"),
        ):
            write_text(path, text)
            with pytest.raises(FileFormatError, match=message):
                load_json(path)

    def test_toml(self, tmp_path: Path) -> None:
        path = tmp_path / "a.toml"
        write_text(path, 'a = 1\n[b]\nc = "d"\n')
        assert load_toml(path) == {"a": 1, "b": {"c": "d"}}
        for text, message in (
            ("a = ", "not valid TOML"),
            ("a = 1\na = 2", "not valid TOML"),
            ("a = " + "[" * 100_000, "nested too deeply|not valid TOML"),
            ("a = " + "9" * 5000, "a.toml"),
        ):
            write_text(path, text)
            with pytest.raises(FileFormatError, match=message):
                load_toml(path)


class TestVersioned:
    def test_round_trip(self, tmp_path: Path) -> None:
        note = Note(text="λ", numbers=(1.0, 2.5))
        write_text(tmp_path / "n.json", dump_json(note))
        assert read_versioned(Note, tmp_path / "n.json", schema="bapipe.note/1") == note

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("3", "no 'schema' entry; expected bapipe.note/1"),
            ('{"text": "x"}', "no 'schema' entry"),
            ('{"schema": "bapipe.note/0", "text": "x"}', "make it again with this version"),
            ('{"schema": "bapipe.plan/1"}', "give the right file"),
            ('{"schema": "bapipe.note/1"}', "'text' is missing; add it"),
        ],
    )
    def test_refused(self, tmp_path: Path, text: str, message: str) -> None:
        write_text(tmp_path / "n.json", text)
        with pytest.raises(FileFormatError, match=message):
            read_versioned(Note, tmp_path / "n.json", schema="bapipe.note/1")


def test_same_value_same_bytes_and_hash() -> None:
    first, second = Note(text="a", numbers=(1.0,)), Note(numbers=(1.0,), text="a")
    assert dump_json(first) == dump_json(second)
    assert content_hash(first) == content_hash(second)
    assert content_hash(first) != content_hash(Note(text="b", numbers=(1.0,)))
    assert len(content_hash(first)) == 16


def test_nan_is_never_written() -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        dump_json({"a": float("nan")})
