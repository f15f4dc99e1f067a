"""The process of one rank, as the launcher of a local run starts, hears and ends it. Imports no torch."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from bapipe.torch.health.rank_end import RankEnd

__all__ = ["RankProcess"]

_LAST_LINES = 1.0
"""seconds to wait for the rest of what a rank that has ended wrote: a process of its own may hold the pipe"""
_SHOWN = 300
"""characters of its last line"""


class RankProcess:
    """Leads a session and a process group of its own, so that what a terminal sends comes through the launcher."""

    def __init__(
        self,
        rank: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        labelled: bool,
        ended: queue.SimpleQueue[RankProcess],
    ) -> None:
        """With `labelled` its standard error is passed on with its rank before each line. It is put into `ended`
        when it ends; `reap` then says how."""
        self.rank = rank
        self.told = False
        """whether it was sent a signal"""
        self._interrupted = False
        """whether that was Ctrl-C: where it was then, nobody wants to know"""
        self.stopped = 0.0
        """seconds for which it had been stopped when it was killed for that"""
        self.at = 0.0
        """when it ended, seconds since the epoch; 0 while it lives"""
        self._said = ""
        self._process = subprocess.Popen(
            command,
            env=dict(environment),
            stderr=subprocess.PIPE if labelled else None,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._pass_on, name=f"rank {rank} stderr", daemon=True)
        if labelled:
            self._reader.start()
        threading.Thread(target=self._wait, args=(ended,), name=f"rank {rank} end", daemon=True).start()

    def _wait(self, ended: queue.SimpleQueue[RankProcess]) -> None:
        # It is left for `reap`: until then nobody else can have its number.
        self._ended_well()
        self.at = time.time()
        ended.put(self)

    def _pass_on(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as lines:
            for line in lines:
                text = line.decode(errors="replace")
                self._said = text.strip() or self._said
                if self._interrupted:
                    continue
                with contextlib.suppress(OSError, ValueError):  # who reads may be gone, and the rank must not wait
                    print(f"rank {self.rank}: {text}", end="", file=sys.stderr, flush=True)

    @property
    def number(self) -> int:
        """Of the process."""
        return self._process.pid

    @property
    def lives(self) -> bool:
        return not self.at

    @property
    def is_stopped(self) -> bool:
        """Whether a signal has stopped it, so that it hears no other; False where the system does not say."""
        with contextlib.suppress(OSError, IndexError):
            text = Path(f"/proc/{self._process.pid}/stat").read_text(encoding="utf-8", errors="replace")
            return text.rpartition(")")[2].split()[0] == "T"
        return False

    def tell(self, number: int) -> None:
        """Send it a signal; one that is stopped would not hear it and is killed."""
        if self.lives:
            self.told = True
            self._interrupted = self._interrupted or number == signal.SIGINT
            if self.is_stopped:
                self.kill()
            else:
                self._send(number)

    def _send(self, number: int) -> None:
        with contextlib.suppress(OSError):
            os.kill(self._process.pid, number)

    def kill(self) -> None:
        """Kill it and all that it has started."""
        self.told = True
        found = [self._process.pid, *_descendants(self._process.pid)]
        for number in found:
            with contextlib.suppress(OSError):
                os.kill(number, signal.SIGKILL)
        with contextlib.suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _ended_well(self) -> bool:
        """Whether it ended with code 0, once it has; taken to be so where SIGCHLD is ignored."""
        try:
            state = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        except ChildProcessError:
            return True
        return state is not None and state.si_code == os.CLD_EXITED and state.si_status == 0

    def reap(self) -> RankEnd:
        """How it ended, once it has; where it failed, what is left of its process group is killed."""
        told = self.told
        if not self._ended_well():
            with contextlib.suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)
        code = self._process.wait()
        if self._process.stderr is not None:
            self._reader.join(_LAST_LINES)
        said = self._said[:_SHOWN]
        return RankEnd(rank=self.rank, code=code, at=self.at, told=told, stopped=self.stopped, said=said)


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
