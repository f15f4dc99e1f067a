"""The notes of a local run, which are files in its folder."""

from __future__ import annotations

import shutil
import stat
import threading
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="ranks run with torch")

from bapipe.torch.health.rank_store import FolderStore


def test_what_is_written_is_read_by_all(tmp_path: Path) -> None:
    one, other = FolderStore(tmp_path / "notes"), FolderStore(tmp_path / "notes")
    assert one.read("at/0") is None
    one.write("at/0", "first")
    one.write("at/0", "then")
    assert other.read("at/0") == "then"
    assert [path.name for path in (tmp_path / "notes").iterdir()] == ["at-0"], "nothing else is left"
    assert stat.S_IMODE((tmp_path / "notes").stat().st_mode) == 0o700


def test_the_first_word_counts_on_all_ranks(tmp_path: Path) -> None:
    answers: list[str] = []
    start = threading.Barrier(8)

    def speak(rank: int) -> None:
        store = FolderStore(tmp_path / "notes")
        start.wait()
        answers.append(store.first("failure", f"rank {rank} failed"))

    threads = [threading.Thread(target=speak, args=(rank,)) for rank in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 8
    assert len(set(answers)) == 1
    assert FolderStore(tmp_path / "notes").read("failure") == answers[0]


def test_a_folder_that_is_gone_is_a_runtime_error_as_of_a_store(tmp_path: Path) -> None:
    store = FolderStore(tmp_path / "notes")
    shutil.rmtree(tmp_path / "notes")
    with pytest.raises(RuntimeError, match="the notes of the run cannot be reached"):
        store.write("at/0", "x")
    with pytest.raises(RuntimeError, match="cannot be reached"):
        store.read("at/0")
    with pytest.raises(RuntimeError, match="cannot be reached"):
        store.first("failure", "x")
