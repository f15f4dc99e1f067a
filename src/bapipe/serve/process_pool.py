"""A few planning processes, each with one question at a time and a limit on its seconds.

Processes, not threads: a search cannot be interrupted, a process can be ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bapipe.errors import BaPipeError
from bapipe.serve.planning_process import LENGTH

__all__ = ["BusyError", "SlowError", "Workers"]

_START_SECONDS = 120.0
"""until a process says it is ready: the first on a machine compiles"""


class BusyError(BaPipeError):
    """More questions wait than may."""


class SlowError(BaPipeError):
    """A question took longer than it may."""


class Workers:
    """The processes. Use within one event loop; `start` and `stop` belong to its lifespan."""

    def __init__(
        self, *, count: int, seconds: float, waiting: int, memory: int = 0, folder: Path | None = None
    ) -> None:
        """`seconds` per question, `waiting` questions at most, `memory` bytes of address space each (0: any)."""
        self._seconds, self._most = seconds, waiting
        self._all = [_Process(memory=memory, folder=folder) for _ in range(count)]
        self._idle: asyncio.Queue[_Process] = asyncio.Queue()
        self._warming: set[asyncio.Task[None]] = set()
        self._waiting = 0

    async def start(self) -> None:
        """Let every process load what it needs; returns at once."""
        for process in self._all:
            self._warm(process)

    async def stop(self) -> None:
        for task in self._warming:
            task.cancel()
        await asyncio.gather(*self._warming, return_exceptions=True)
        for process in self._all:
            await process.end()

    async def ask(self, job: dict[str, Any], *, begin: Callable[[], None] | None = None) -> dict[str, Any]:
        """The answer of the next free process. Raises BusyError, or SlowError after the limit.

        `begin` is called when a process takes the question. Cancelled, it leaves the queue, or ends the process
        that works on it and starts another.
        """
        if self._waiting >= self._most:
            raise BusyError(f"{self._most} questions wait already; ask again in a moment")
        self._waiting += 1
        try:
            process = await self._idle.get()
        finally:
            self._waiting -= 1
        done = False
        try:
            if begin is not None:
                begin()
            async with asyncio.timeout(self._seconds):
                found = await process.ask(job)
            done = True
            return found
        except TimeoutError:
            raise SlowError(
                f"this took longer than {self._seconds:g} s; force a schedule, a micro-batch size or fewer "
                "accelerators, or use `bapipe plan`, which has no limit"
            ) from None
        except (EOFError, OSError, ValueError):
            raise BusyError("the planning process ended before it answered; ask again") from None
        finally:
            if done:
                self._idle.put_nowait(process)
            else:
                self._warm(process)

    def _warm(self, process: _Process) -> None:
        """End what it is at, start it anew, and offer it when it is ready."""

        async def warm() -> None:
            await process.end()
            try:
                async with asyncio.timeout(_START_SECONDS):
                    await process.begin()
            except (EOFError, OSError, TimeoutError) as error:
                print(f"bapipe: a planning process did not start: {error!r}", file=sys.stderr)
            # Offered even so: the question that gets it fails, and it is started again.
            self._idle.put_nowait(process)

        task = asyncio.create_task(warm())
        self._warming.add(task)
        task.add_done_callback(self._warming.discard)


class _Process:
    """One `python -m bapipe.serve.planning_process`."""

    def __init__(self, *, memory: int, folder: Path | None) -> None:
        self._folder = folder
        # One thread each: the processes are what runs in parallel.
        single = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS"), "1")
        self._environment = {**os.environ, **single, "BAPIPE_MEMORY": str(memory)}
        self._process: asyncio.subprocess.Process | None = None

    async def begin(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            "-m",
            "bapipe.serve.planning_process",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            cwd=self._folder,
            env=self._environment,
            start_new_session=True,  # Ctrl+C reaches the server alone, which ends its processes
        )
        await self._receive()

    async def ask(self, job: dict[str, Any]) -> dict[str, Any]:
        process = self._process
        if process is None or process.stdin is None:
            raise EOFError
        body = json.dumps(job).encode()
        process.stdin.write(LENGTH.pack(len(body)) + body)
        await process.stdin.drain()
        found: dict[str, Any] = await self._receive()
        return found

    async def _receive(self) -> Any:
        assert self._process is not None
        assert self._process.stdout is not None
        stream = self._process.stdout
        length = LENGTH.unpack(await stream.readexactly(LENGTH.size))[0]
        return json.loads(await stream.readexactly(length))

    async def end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        if process.stdin is not None:
            process.stdin.close()
