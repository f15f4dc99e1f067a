"""What slices write for a shell and on disk: quoted, and for this user alone."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from bapipe.torch.slices import mps


def test_a_shell_takes_the_printed_environment_as_it_was_meant(tmp_path: Path) -> None:
    variables = {
        "CUDA_MPS_PIPE_DIRECTORY": f"{tmp_path}/my cache; touch {tmp_path}/ran/pipe",
        "NCCL_HOSTID": "host-$(id)-'gpu0'",
        "CUDA_VISIBLE_DEVICES": "0",
    }
    lines = mps.exported(variables)
    assert "export CUDA_VISIBLE_DEVICES=0" in lines.splitlines()
    shown = " ".join(f'"${name}"' for name in variables)
    done = subprocess.run(
        ["sh", "-c", f"{lines}\nprintf '%s\\n' {shown}"], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == list(variables.values())
    assert shlex.split(lines.splitlines()[0])[1].partition("=")[2] == variables["CUDA_MPS_PIPE_DIRECTORY"]


def test_the_daemons_pipes_and_logs_are_for_this_user_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon and the driver's tools are shell scripts that answer: no GPU is needed to see what is made."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name, text in (("nvidia-smi", 'echo "GPU 0: one"'), ("nvidia-cuda-mps-control", "cat >/dev/null")):
        (tools / name).write_text(f"#!/bin/sh\n{text}\n", encoding="ascii")
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("BAPIPE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache" / "mps" / "gpu0").mkdir(parents=True)  # made by an older version, open to all
    (tmp_path / "cache" / "mps" / "gpu0").chmod(0o777)
    before = os.umask(0)
    try:
        made = mps.start((50.0, 50.0))
    finally:
        os.umask(before)
    folder = Path(made.folder)
    assert [path.stat().st_mode & 0o777 for path in (folder, folder / "pipe", folder / "log")] == [0o700] * 3
