"""Processes of this machine: which they are, whether they have ended, and signals while a call blocks."""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

__all__ = ["end_process", "has_ended", "on_termination", "own_machine", "own_process"]

_NAME = re.compile(r"([1-9]\d{0,9}) (\d{0,20})")
"""of a process: its number and its start, which not every system has"""
_RUN = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")
"""what torchrun, or the launcher of a local run, gives all its ranks and nobody else"""
_handled: dict[int, Any] = {}
"""signals that `on_termination` listens for, and what handled them before"""


def own_machine() -> str:
    """The same for all who see the same processes: one boot of a machine, one namespace of process numbers."""
    from bapipe.torch.comm.rank_agreement import machine_name  # here, because it imports torch, and a launcher not

    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    return f"{machine_name()} {namespace}"


def own_process() -> str:
    """Number and start of this process; the start distinguishes it from a later one of the same number."""
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
    """Whether a process of this machine, as it named itself, is no more; of what is no name that is not known."""
    named = _NAME.fullmatch(process)
    if named is None:
        return False
    number, start = int(named[1]), named[2]
    if start:
        state, found = _state(number)
        return found != start or state in ("Z", "X")
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        return False
    return False


def end_process(process: str) -> bool:
    """Kill another rank of this run, as it named itself; returns whether it was done.

    The name may come from a store that others can write to. So it must be a process of this user that the same
    launcher has started for the same run, and the system must distinguish it from a later one of the same number.
    """
    named = _NAME.fullmatch(process)
    if named is None or not named[2] or not hasattr(os, "pidfd_open"):
        return False
    number = int(named[1])
    try:
        handle = os.pidfd_open(number)
    except (OSError, OverflowError):
        return False
    try:
        # The handle is of one process, whoever has its number later: what is looked at is what is killed.
        if has_ended(process) or not _is_rank_of_this_run(number):
            return False
        signal.pidfd_send_signal(handle, signal.SIGKILL)
    except OSError:
        return False
    finally:
        os.close(handle)
    return True


def _is_rank_of_this_run(number: int) -> bool:
    own = [f"{name}={os.environ[name]}".encode() for name in _RUN if name in os.environ]
    try:
        folder = Path(f"/proc/{number}")
        parent = int((folder / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[1])
        environment = set((folder / "environ").read_bytes().split(b"\0"))
        user = folder.stat().st_uid
    except (OSError, ValueError, IndexError):
        return False
    same_run = len(own) == len(_RUN) and environment.issuperset(own)
    return same_run and parent == os.getppid() and user == os.geteuid() and number != os.getpid()


def on_termination(call: Callable[[int], None], signals: Iterable[int] = (signal.SIGTERM,)) -> bool:
    """Have `call` called in a thread when such a signal comes, even while the main thread is in a blocking call.

    torchrun sends SIGTERM to all ranks of a node as soon as one has failed. Only signals that would have their
    default effect, from the main thread, and where nobody else is woken by signals; returns whether it was done.
    `call` gets the signal's number, and is not called again before it returns. In processes forked from this one
    the signals have their default effect.
    """
    if threading.current_thread() is not threading.main_thread():
        return False
    usual = (signal.SIG_DFL, signal.default_int_handler)
    wanted = {number: signal.getsignal(number) for number in signals}
    wanted = {number: handler for number, handler in wanted.items() if handler in usual}
    if not wanted:
        return False
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    if before != -1:
        signal.set_wakeup_fd(before)
        return False
    _handled.update(wanted)
    for number in wanted:
        signal.signal(number, lambda _number, _frame: None)
    # A signal between the fork and the hook in the child would be handled by its parent: it is deferred until
    # then.
    os.register_at_fork(before=_block_signals, after_in_parent=_unblock_signals, after_in_child=_as_before)

    threading.Thread(target=_listen, args=(reader, writer, call), name="bapipe signals", daemon=True).start()
    return True


def _listen(reader: socket.socket, writer: socket.socket, call: Callable[[int], None]) -> None:
    """Both ends are open for as long as this runs: the system writes every signal's number into `writer`."""
    while writer.fileno() >= 0:
        for number in reader.recv(64):
            if number in _handled:
                call(number)


def _block_signals() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, _handled)


def _unblock_signals() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _handled)


def _as_before() -> None:
    """In a process that was forked; from a thread its main thread is that one, so both calls are allowed."""
    signal.set_wakeup_fd(-1)
    for number, handler in _handled.items():
        signal.signal(number, handler)
    _unblock_signals()
