"""`bapipe serve` on the command line: what it says, and what it cannot do."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path

from served import BAPIPE, serving


def refused(*arguments: str) -> str:
    done = subprocess.run([BAPIPE, "serve", *arguments], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    return done.stderr


def test_a_port_that_is_taken() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        words = refused("--port", str(port))
    assert words.startswith(f"bapipe: cannot serve at 127.0.0.1 port {port}: ")
    assert words.endswith("; choose another --port or --host\n")


def test_what_is_no_host_port_or_folder(tmp_path: Path) -> None:
    assert "cannot serve at nowhere.invalid port" in refused("--host", "nowhere.invalid")
    assert "65536 is not in the range" in refused("--port", "65536")
    assert "does not exist" in refused("--folder", str(tmp_path / "no"))


def test_without_the_extra(tmp_path: Path) -> None:
    """With packages of those names hidden, as they are where the extra was not installed."""
    program = (
        "import sys, importlib.util as util\n"
        "find = util.find_spec\n"
        "util.find_spec = lambda name, *rest: None if name == 'uvicorn' else find(name, *rest)\n"
        "sys.argv = ['bapipe', 'serve']\n"
        "from bapipe.cli import main\n"
        "main()\n"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == "bapipe: the page needs two more packages; run: pip install 'bapipe[serve]'\n"


def processes(*arguments: str) -> list[int]:
    found = subprocess.run(["ps", "-o", "pid=", *arguments], capture_output=True, text=True, timeout=120)
    return [int(pid) for pid in found.stdout.split()]


def test_it_ends_with_all_its_processes() -> None:
    with serving() as running:
        assert running.url.startswith("http://127.0.0.1:")
        assert running.ask("/api/choices").json["own_models"] == []
        assert running.ask("/api/plan", {"model": "alexnet", "cluster": "1xv100"}).status == 200
        children = processes("--ppid", str(running.process.pid))
        running.process.send_signal(signal.SIGTERM)
        running.process.wait(timeout=120)
    assert children
    assert processes("-p", ",".join(map(str, children))) == []


def test_others_are_warned_of() -> None:
    """And Ctrl+C ends it in order, even before the page is there."""
    command = [BAPIPE, "serve", "--host", "0.0.0.0", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("warning: everyone who reaches 0.0.0.0 can ask this")
            assert process.stdout.readline().startswith("BaPipe plans at http://127.0.0.1:")
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(timeout=120)
        assert process.stderr is not None
        assert (process.returncode, process.stderr.read()) == (0, "")
