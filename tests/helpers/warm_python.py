"""Python processes that begin with torch loaded: forked from a process that has loaded it, and nothing else.

To load torch takes a rank of a test longer than all else that it does, and tests start a few hundred. Within
`warm_starts()` what `subprocess` starts of this interpreter is forked instead, and so is what that starts: a
launcher's ranks, or torchrun's. They are processes as ever, children of whoever starts them, with their own
arguments, variables, folder, streams and session, as /proc shows them.

    pytest --- loaded (this file, once per process of tests)
      |          |  forks a process, whose parent ends: it becomes a child of pytest
      +--- python -m bapipe run …
             |  forks itself
             +--- python -m bapipe.torch.launch.worker …

Other commands, and systems other than Linux, start as usual. With `pytest --cold` everything does.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import importlib.util
import io
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

__all__ = ["USUAL_START", "warm_starts"]

USUAL_START = subprocess.Popen

_LOADED = (
    "torch.distributed.run",
    "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler",
    "torch.export._trace",
    "bapipe.torch.launch.worker",
    "bapipe.torch.launch.local_ranks",
    "bapipe.cli",
)
_STARTED = ("torch.distributed.run", "bapipe.torch.launch.worker", "bapipe.torch.launch.local_ranks")
"""what is run by its name: loaded for what it loads, and then forgotten"""
_SUBREAPER = 36
"""PR_SET_CHILD_SUBREAPER"""
_ROOM = 100_000
"""bytes for the arguments, and for the variables, of a process that is forked"""


class _WarmPopen(subprocess.Popen):  # type: ignore[type-arg]
    """Forks where it can."""

    def _execute_child(self, args: Any, *rest: Any) -> None:
        (executable, preexec_fn, _close, pass_fds, cwd, env, _startup, _flags, shell, *pipes, restore,
         gid, gids, uid, umask, start_new_session, process_group) = rest  # fmt: skip
        command = None if isinstance(args, (str, bytes)) else _warm_command([os.fsdecode(item) for item in args])
        unusual = any((executable, preexec_fn, pass_fds, shell, not restore)) or max(umask, process_group) >= 0
        if command is None or unusual or {gid, gids, uid} != {None}:
            super()._execute_child(args, *rest)  # type: ignore[misc]
            return
        child_in, own_in, own_out, child_out, own_error, child_error = pipes
        streams = [
            number if given == -1 else given for number, given in enumerate((child_in, child_out, child_error))
        ]
        variables = {
            os.fsdecode(key): os.fsdecode(value) for key, value in (os.environ if env is None else env).items()
        }
        request = {
            "command": command,
            "variables": variables,
            "folder": str(Path.cwd() if cwd is None else cwd),
            "session": start_new_session,
        }
        self.pid = _fork_here(request, streams) if _is_warm else _fork_elsewhere(request, streams)
        self._child_created = True
        self._close_pipe_fds(child_in, own_in, own_out, child_out, own_error, child_error)  # type: ignore[attr-defined]


def _warm_command(command: Sequence[str]) -> list[str] | None:
    """[niceness, option or "", -m, -c or "", what is run, its arguments …]; None: to be started as usual."""
    words, nice, unbuffered = list(command), "0", ""
    if words[:2] == ["nice", "-n"]:
        nice, words = words[2], words[3:]
    if words and Path(words[0]).name == "bapipe" and Path(words[0]).parent == Path(sys.executable).parent:
        return [nice, "", "", *words]
    if not words or words[0] != sys.executable:
        return None
    words = words[1:]
    if words[:1] == ["-u"]:
        unbuffered, words = "-u", words[1:]
    if words[:1] == ["-m"] and len(words) > 1:
        return [nice, unbuffered, *words]
    if words[:1] == ["-c"] and len(words) > 1 and "torch" in words[1]:
        return [nice, unbuffered, *words]
    return [nice, unbuffered, "", *words] if words and words[0].endswith(".py") else None


_is_warm = False
"""whether this process was forked from the one that has loaded torch"""
_server: socket.socket | None = None
_server_lock = threading.Lock()


@contextlib.contextmanager
def warm_starts() -> Iterator[None]:
    """Within this, processes begin with torch loaded."""
    if sys.platform != "linux" or importlib.util.find_spec("torch") is None:
        yield
        return
    before = subprocess.Popen
    subprocess.Popen = _WarmPopen  # type: ignore[misc]
    try:
        yield
    finally:
        subprocess.Popen = before  # type: ignore[misc]


def _fork_elsewhere(request: dict[str, Any], streams: Sequence[int]) -> int:
    """Have the process that has loaded torch fork one, which becomes this one's child."""
    global _server
    with _server_lock:
        if _server is None:
            _server = _start_server()
        prctl = ctypes.CDLL(None).prctl
        prctl(_SUBREAPER, 1, 0, 0, 0)
        try:
            socket.send_fds(_server, [json.dumps(request).encode()], streams)
            answer = _server.recv(100)
        finally:
            prctl(_SUBREAPER, 0, 0, 0, 0)
    assert answer, "the process that has loaded torch has ended"
    return int(answer)


def _start_server() -> socket.socket:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    # What libraries read as they are loaded; and room for the arguments and variables of what is forked.
    variables |= {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "FATAL", "PADDING": "x" * _ROOM}
    os.set_inheritable(theirs.fileno(), True)
    command = [sys.executable, __file__, str(theirs.fileno()), "x" * _ROOM]
    process = USUAL_START(command, env=variables, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
    theirs.close()

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ours


def _serve(server: socket.socket) -> None:
    """Fork what is asked for until nobody can ask any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl+C is for the tests, who then let this one end
    gc.disable()
    for name in _LOADED:
        importlib.import_module(name)
    for name in _STARTED:
        del sys.modules[name]
    gc.freeze()
    gc.enable()
    while True:
        data, streams, _, _ = socket.recv_fds(server, 1 << 22, 3)
        if not data:
            return
        reader, writer = os.pipe()
        between = os.fork()
        if between == 0:
            between = os.getpid()
            child = os.fork()
            if child == 0:
                while os.getppid() == between:
                    time.sleep(0.0005)
                _become(json.loads(data), streams)
            os.write(writer, str(child).encode())
            os._exit(0)
        # Once it is gone its child is the child of whoever asked.
        os.waitpid(between, 0)
        server.send(os.read(reader, 100))
        for number in (reader, writer, *streams):
            os.close(number)


def _fork_here(request: dict[str, Any], streams: Sequence[int]) -> int:
    child = os.fork()
    if child == 0:
        _become(request, streams)
    return child


def _become(request: dict[str, Any], streams: Sequence[int]) -> None:
    """Be the process that was asked for, to its end; never returns."""
    code = 1
    try:
        _take_on(request, streams)
        code = _run(request["command"][2:])
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    finally:
        with contextlib.suppress(BaseException):
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(BaseException):
                stream.flush()
        os._exit(code)


def _take_on(request: dict[str, Any], streams: Sequence[int]) -> None:
    """All that a process has of its own but what it runs."""
    global _is_warm, _server_lock
    _is_warm, _server_lock = True, threading.Lock()
    nice, unbuffered, kind, *words = request["command"]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    atexit._clear()
    for place, number in enumerate([os.dup(number) for number in streams]):
        os.dup2(number, place)
    os.closerange(3, 4096)
    if request["session"]:
        os.setsid()
    os.nice(int(nice))
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["variables"])
    _show(words)
    for number, name in ((1, "stdout"), (2, "stderr")):
        raw = io.FileIO(number, "w", closefd=False)
        plain = unbuffered or number == 2
        stream = io.TextIOWrapper(
            raw if unbuffered else io.BufferedWriter(raw),  # type: ignore[arg-type]
            encoding="utf-8",
            errors="backslashreplace" if number == 2 else "strict",
            line_buffering=number == 2,
            write_through=bool(plain),
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    tempfile.tempdir = None
    added = [item for item in os.environ.get("PYTHONPATH", "").split(os.pathsep) if item]
    sys.path[:] = [str(Path.cwd()) if kind else str(Path(words[0]).resolve().parent), *added, *_OWN_PATH]
    sys.argv = ["-c", *words[1:]] if kind == "-c" else words
    sys.modules["bapipe.torch.health.parent_death"]._parent = os.getppid()  # type: ignore[attr-defined]
    subprocess.Popen = _WarmPopen  # type: ignore[misc]
    sys.modules[_LOADED[1]].Popen = _WarmPopen  # type: ignore[attr-defined]
    threads = os.environ.get("OMP_NUM_THREADS")
    sys.modules["torch"].set_num_threads(int(threads) if threads else os.cpu_count() or 1)


def _show(words: Sequence[str]) -> None:
    """Have /proc show the arguments and variables of this process; no library reads the old ones any more."""
    fields = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    first, last, start, end = map(int, fields[45:49])
    variables = [f"{name}={value}" for name, value in os.environ.items()]
    for texts, begin, stop in (([sys.executable, *words], first, last), (variables, start, end)):
        shown = b"".join(os.fsencode(text) + b"\0" for text in texts)[: stop - begin - 1]
        ctypes.memset(begin, 0, stop - begin)
        ctypes.memmove(begin, shown, len(shown))


def _run(command: Sequence[str]) -> int:
    """Run `-m module`, `-c code` or a script as Python does; the exit code."""
    kind, what, *_ = command
    try:
        if kind == "-m":
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        elif kind == "-c":
            module = types.ModuleType("__main__")
            sys.modules["__main__"] = module
            exec(compile(what, "<string>", "exec"), vars(module))
        else:
            runpy.run_path(what, run_name="__main__")
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            return (stop.code or 0) & 0xFF
        print(stop.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        sys.stdout.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    return 0


_OWN_PATH: list[str] = []
if __name__ == "__main__":
    # Under its own name, which the forked processes' __main__ does not have.
    _OWN_PATH = sys.path[1:]
    import warm_python

    warm_python._OWN_PATH = _OWN_PATH
    sys.path[:] = _OWN_PATH
    warm_python._serve(socket.socket(fileno=int(sys.argv[1])))
