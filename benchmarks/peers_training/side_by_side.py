"""Several settings at once, each by a process of run.py with a folder of its own, that measure by turns."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from contenders import CUTS, SETTINGS, Setting, parse_row

if TYPE_CHECKING:
    from run import Rows

__all__ = ["run_beside"]

HERE = Path(__file__).resolve().parent
LAUNCHES = ("nccl", "peers", "auto", "none")
ENDING = 15.0
"""seconds that a process is told to end before the others' time is over"""


def run_beside(work: Rows, count: int, *, until: str, repeats: int) -> bool:
    """Whether nothing that was asked for is left. Slices are cut and links measured before all else."""
    due = {setting: _due(work, setting, repeats) for setting in SETTINGS}
    try:
        for word in CUTS:
            settings = [setting for setting in SETTINGS if setting.slices == word and due[setting]]
            if settings and work.left > work.patience:
                work.cut(word)
                launches = {parse_row(name)[1].launch for setting in settings for name in due[setting]}
                for transport in ("nccl", *(["auto"] if "auto" in launches else [])):
                    work.cluster_of(settings[0], transport)
                _run_all(work, settings, due, count, until=until, repeats=repeats)
    finally:
        work.close()
    return until != "rows" or not any(_due(work, setting, repeats) for setting in SETTINGS)


def _due(work: Rows, setting: Setting, repeats: int) -> list[str]:
    return [name for launch in LAUNCHES for name in work.due(setting, launch, repeats)]


def _run_all(
    work: Rows, settings: list[Setting], due: dict[Setting, list[str]], count: int, *, until: str, repeats: int
) -> None:
    """Run settings of one cut, so many at a time."""
    waiting, running = list(settings), dict[Setting, subprocess.Popen[bytes]]()
    try:
        while waiting or running:
            while waiting and len(running) < count and work.left > 4 * ENDING:
                setting = waiting.pop(0)
                running[setting] = _begin(work, setting, due[setting], until=until, repeats=repeats)
            if not running:
                return
            time.sleep(0.2)
            for setting in [own for own, process in running.items() if process.poll() is not None]:
                running.pop(setting)
                _take(work, setting)
                print(f"[{work.left:5.0f} s left] {setting.name}: ended", flush=True)
    finally:
        for process in running.values():
            process.send_signal(signal.SIGTERM)
        for setting, process in running.items():
            process.wait()
            _take(work, setting)


def _begin(work: Rows, setting: Setting, rows: list[str], *, until: str, repeats: int) -> subprocess.Popen[bytes]:
    folder = _folder(work, setting)
    folder.mkdir(parents=True, exist_ok=True)
    words = [sys.executable, str(HERE / "run.py"), "--folder", str(folder), "--rows", ",".join(rows)]
    words += ["--budget", f"{work.left - ENDING:.0f}", "--until", until, "--repeats", str(repeats)]
    words += ["--turn", str(work.folder / "turn"), "--shared", str(work.folder)]
    words += ["--tiny"] if work.tiny else []
    print(f"[{work.left:5.0f} s left] {setting.name}: {len(rows)} rows", flush=True)
    with (folder / "said.txt").open("ab") as said:
        return subprocess.Popen(words, cwd=HERE, env=work.environment, stdout=said, stderr=said)


def _folder(work: Rows, setting: Setting) -> Path:
    return work.folder / setting.stem


def _take(work: Rows, setting: Setting) -> None:
    """What the process of a setting found, into the rows of all."""
    path = _folder(work, setting) / "rows.json"
    if path.exists():
        work.rows |= json.loads(path.read_text(encoding="utf-8"))
        work.write()
