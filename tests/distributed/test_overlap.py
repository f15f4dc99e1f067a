"""The overlap benchmark runs from end to end and leaves nothing behind. How fast is for the benchmark to say."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from loaded_files import load_file

FOLDER = Path(__file__).parents[2] / "benchmarks" / "overlap"


namespaces = load_file(FOLDER / "namespaces.py", "overlap_namespaces")
REASON = namespaces.why_not()
needs_root = pytest.mark.skipif(REASON is not None, reason=str(REASON))


def _left(process: int) -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True).stdout
    return [line for line in listed.splitlines() if line.startswith(f"bapipe-{process}-")]


def _start(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(FOLDER / "overlap.py"), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.root
@pytest.mark.slow
@needs_root
def test_a_tiny_run_measures_everything_and_cleans_up(tmp_path: Path) -> None:
    process = _start("--tiny", "--out", str(tmp_path))
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    result = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    (row,) = result["overlap"]["cases"]
    assert len(row["links"]) == result["settings"]["ranks"] - 1
    # No run beats its own compute: the rank that does all F and B of M micro-batches.
    settings = result["settings"]
    least = settings["microbatches"] * (settings["forward"] + settings["backward"])
    assert all(about["median"] > least for about in row["systems"].values())
    (part,) = result["overhead"]
    assert all(about["thread"] > 0 for about in part["systems"].values())
    assert "| bapipe 1f1b-so |" in (tmp_path / "result.md").read_text(encoding="utf-8")
    assert _left(process.pid) == []


@pytest.mark.root
@pytest.mark.slow
@needs_root
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_leaves_no_namespace(number: signal.Signals, tmp_path: Path) -> None:
    process = _start("--tiny", "--out", str(tmp_path))
    end = time.monotonic() + 60
    while not _left(process.pid) and time.monotonic() < end:
        time.sleep(0.05)
    assert _left(process.pid), "the run made no namespace"
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode != 0
    assert _left(process.pid) == []
    assert not (tmp_path / "result.json").exists()


@pytest.mark.root
@needs_root
def test_neighbours_are_linked_and_shaped() -> None:
    with namespaces.chain(3) as net:
        net.shape("500mbit")
        for rank, name in enumerate(net.names):
            shown = subprocess.run(
                ["tc", "-n", name, "qdisc", "show"], check=True, capture_output=True, text=True
            ).stdout
            assert shown.count("tbf") == (1 if rank in (0, 2) else 2)
        net.shape(None)
        shown = subprocess.run(
            ["tc", "-n", net.names[1], "qdisc", "show"], check=True, capture_output=True, text=True
        ).stdout
        assert "tbf" not in shown
    assert _left(os.getpid()) == []


def test_without_root_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert namespaces.why_not() == "network namespaces need root"
    with pytest.raises(namespaces.BaPipeError, match="run as root"), namespaces.chain(2):
        pass
