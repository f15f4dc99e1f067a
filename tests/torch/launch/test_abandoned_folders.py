"""The folder of a launcher that was killed goes with the next run; those of others stay."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from bapipe.torch.launch.abandoned_folders import folder_prefix, remove_abandoned

pytestmark = pytest.mark.skipif(not Path("/proc").is_dir(), reason="telling processes apart needs /proc")

CODE = """\
import sys, tempfile
from bapipe.torch.launch.abandoned_folders import folder_prefix
assert "torch" not in sys.modules
print(tempfile.mkdtemp(prefix=folder_prefix()), flush=True)
sys.stdin.read()
"""


def test_the_folder_of_a_killed_launcher_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    own, other = Path(tempfile.mkdtemp(prefix=folder_prefix())), tmp_path / "bapipe-run-of-somebody-else"
    other.mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", CODE],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as launcher:
        assert launcher.stdout is not None
        left = Path(launcher.stdout.readline().strip())
        (left / "note").write_text("left", encoding="ascii")
        remove_abandoned()
        assert left.is_dir(), "its launcher lives"
        launcher.send_signal(signal.SIGKILL)
        launcher.wait()
    remove_abandoned()
    assert not left.exists()
    assert own.is_dir()
    assert other.is_dir()
