"""torchrun under `bapipe run`: what stops the one stops the other, and nothing that was started stays.

SIGTERM, SIGHUP and SIGINT are passed on to torchrun, which passes them on to its ranks and kills those that have
not ended after its own limit (30 s, or TORCH_ELASTIC_SHUTDOWN_TIMEOUT). A few seconds later, or at a second
SIGTERM or SIGINT, all that torchrun has started is killed here. Imports no torch.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

__all__ = ["Ended", "grace", "supervise"]

_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
_SAME = 1.0
"""seconds; `timeout` and others send a signal to the process and to its group: the second one is no other"""
_TORCHRUN = 30.0
"""seconds that torchrun gives its ranks, unless TORCH_ELASTIC_SHUTDOWN_TIMEOUT says otherwise"""
_MORE = 5.0
"""seconds that torchrun itself takes beyond that"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How torchrun ended."""

    code: int
    stopped_by: signal.Signals | None
    """the signal that stopped this process; None: it ended by itself"""
    killed: bool
    """whether all that it had started had to be killed"""
    output: str
    """what torchrun itself wrote on standard error, where that was asked for"""


def grace() -> float:
    """Seconds after a signal until what is left of a run is killed."""
    try:
        own = float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", _TORCHRUN))
    except ValueError:
        own = _TORCHRUN
    return max(0.0, own) + _MORE


def supervise(
    arguments: Sequence[str],
    environment: dict[str, str],
    *,
    started: Callable[[int], None] | None = None,
    keeps: Callable[[str], bool] | None = None,
) -> Ended:
    """Run torchrun with these arguments to its end.

    `started` is called with its process number. With `keeps` each line on its standard error is shown to that, and
    kept for `output` if it says so.
    """
    command = [sys.executable, "-m", "bapipe.torch.launch.torchrun_agent", str(os.getpid()), *arguments]
    own: list[str] = []
    with _stopping() as stop:
        process = subprocess.Popen(
            command,
            env=environment,
            stderr=None if keeps is None else subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,  # what a terminal sends comes from here, once
        )
        try:
            stop.begin(process)
            if started is not None:
                started(process.pid)
            if keeps is not None and process.stderr is not None:
                own = [line for line in process.stderr if keeps(line)]
            process.wait()
        except BaseException:
            _kill(process)
            process.wait()
            raise
        finally:
            stop.end()
            if process.stderr is not None:
                process.stderr.close()
    return Ended(code=process.returncode, stopped_by=stop.signal, killed=stop.killed, output="".join(own))


class _Stop:
    """What happens to torchrun when a signal stops this process."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self.killed = False
        self._process: subprocess.Popen[str] | None = None
        self._at = 0.0
        self._timer: threading.Timer | None = None

    def handle(self, number: int, _frame: FrameType | None) -> None:
        if self.signal is None:
            self.signal, self._at = signal.Signals(number), time.monotonic()
            self._pass_on()
        elif number != signal.SIGHUP and time.monotonic() - self._at > _SAME:
            self._kill()

    def begin(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._pass_on()

    def _pass_on(self) -> None:
        if self._process is None or self.signal is None or self._timer is not None:
            return
        self._timer = threading.Timer(grace(), self._kill)
        self._timer.daemon = True
        self._timer.start()
        self._process.send_signal(self.signal)

    def _kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self.killed = True
            _kill(self._process)

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


@contextlib.contextmanager
def _stopping() -> Iterator[_Stop]:
    """Signals that would end this process are heard instead, if this is the main thread; those that it ignores, as
    under nohup, or handles itself stay as they are."""
    stop, before = _Stop(), {}
    if threading.current_thread() is threading.main_thread():
        usual = (signal.SIG_DFL, signal.default_int_handler)
        before = {number: signal.getsignal(number) for number in _SIGNALS}
        before = {number: handler for number, handler in before.items() if handler in usual}
    for number in before:
        signal.signal(number, stop.handle)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _kill(process: subprocess.Popen[str]) -> None:
    """Kill torchrun and all that it has started; each rank leads a group of its own."""
    found = [process.pid, *_descendants(process.pid)]
    for number in found:
        with contextlib.suppress(OSError):
            os.kill(number, signal.SIGKILL)
    for number in found:
        with contextlib.suppress(OSError):
            os.killpg(number, signal.SIGKILL)


def _descendants(process: int) -> list[int]:
    """Processes that a process has started, and those that they have; none where the system has no /proc."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            parent = int(path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(path.parent.name))
    found, ahead = list[int](), [process]
    while ahead:
        ahead = [child for parent in ahead for child in children.get(parent, ())]
        found += ahead
    return found
