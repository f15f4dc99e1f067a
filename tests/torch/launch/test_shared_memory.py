"""What ranks leave in shared memory goes with their run, and nothing else does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bapipe.torch.launch.shared_memory import left_files, remove_left_files
from bapipe.torch.launch.supervise import supervise

pytestmark = pytest.mark.skipif(not Path("/proc").is_dir(), reason="telling processes apart needs /proc")

LEAVES = """\
import os
number = os.getpid()
for name in (f"torch_{number}_374439997_1", f"cuda.shm.{os.getuid():x}.{number:x}.1"):
    open(f"/dev/shm/{name}", "w").close()
print(number, flush=True)
"""


def ended_process() -> int:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        pass
    return process.pid


def test_files_of_an_ended_process_are_removed_and_others_stay(tmp_path: Path) -> None:
    ended, lives = ended_process(), os.getpid()
    gone = {f"torch_{ended}_374439997_1", f"cuda.shm.0.{ended:x}.1"}
    kept = {f"torch_{lives}_1_1", f"cuda.shm.0.{lives:x}.1", f"torch_{ended}", f"mine_{ended}_1", "cuda.shm.0.x.1"}
    for name in gone | kept:
        (tmp_path / name).touch()
    assert {path.name for path in left_files([ended, lives], folder=tmp_path)} == gone
    remove_left_files([ended, lives], folder=tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == kept


def test_no_shared_memory_is_no_error(tmp_path: Path) -> None:
    remove_left_files([ended_process()], folder=tmp_path / "none")


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs /dev/shm")
@pytest.mark.parametrize("end", ["", "os.kill(number, 9)"], ids=["ends", "is killed"])
def test_a_launcher_leaves_nothing_of_its_ranks(end: str, capfd: pytest.CaptureFixture[str]) -> None:
    supervise([([sys.executable, "-c", LEAVES + end], dict(os.environ))] * 2)
    numbers = list(map(int, capfd.readouterr().out.split()))
    assert len(numbers) == 2
    assert not list(left_files(numbers))
