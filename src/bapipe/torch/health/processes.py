"""Processes of this machine: which they are, whether they live, and word of SIGTERM while a call blocks."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path

from bapipe.torch.comm.rank_agreement import machine_name

__all__ = ["end_process", "has_ended", "on_termination", "own_machine", "own_process"]


def own_machine() -> str:
    """The same for all who see the same processes: one boot of a machine, one namespace of process numbers."""
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    return f"{machine_name()} {namespace}"


def own_process() -> str:
    """Number and start of this process; the start tells it from a later one of the same number."""
    return f"{os.getpid()} {_state(os.getpid())[1]}"


def _state(number: int) -> tuple[str, str]:
    """(state, start) of a process; ("", "") if there is none or the system does not say."""
    try:
        text = Path(f"/proc/{number}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "", ""
    fields = text.rpartition(")")[2].split()
    return fields[0], fields[19]


def has_ended(process: str) -> bool:
    """Whether a process of this machine, as it named itself, is no more."""
    number, _, start = process.partition(" ")
    if start:
        state, found = _state(int(number))
        return found != start or state in ("Z", "X")
    try:
        os.kill(int(number), 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False


def end_process(process: str) -> None:
    """Kill a process of this machine, as it named itself; only where the system tells it from a later one."""
    number, _, start = process.partition(" ")
    if start and not has_ended(process):
        with contextlib.suppress(OSError):
            os.kill(int(number), signal.SIGKILL)


def on_termination(call: Callable[[], None]) -> bool:
    """Have `call` called in a thread when SIGTERM comes, even while the main thread is in a call that blocks.

    torchrun sends it to all ranks of a node as soon as one has failed. Only where the signal would have its
    default effect, from the main thread, and where nobody else is woken by signals; returns whether it was done.
    `call` must end the process. Processes forked from this one end by SIGTERM as always.
    """
    if threading.current_thread() is not threading.main_thread():
        return False
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return False
    ear, mouth = socket.socketpair()
    mouth.setblocking(False)
    before = signal.set_wakeup_fd(mouth.fileno(), warn_on_full_buffer=False)
    if before != -1:
        signal.set_wakeup_fd(before)
        return False
    signal.signal(signal.SIGTERM, lambda _number, _frame: None)
    # A signal between the fork and the hook in the child would be heard by its parent: it is put off until then.
    os.register_at_fork(before=_deaf, after_in_parent=_hearing, after_in_child=_as_before)

    threading.Thread(target=_listen, args=(ear, mouth, call), name="bapipe SIGTERM", daemon=True).start()
    return True


def _listen(ear: socket.socket, mouth: socket.socket, call: Callable[[], None]) -> None:
    """Both ends are open for as long as this runs: the system writes every signal's number into `mouth`."""
    while mouth.fileno() >= 0:
        if signal.SIGTERM in ear.recv(64):
            call()


def _deaf() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _hearing() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def _as_before() -> None:
    """In a process that was forked; from a thread its main thread is that one, so both calls are allowed."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _hearing()
