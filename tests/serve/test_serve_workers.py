"""Planning processes that take too long, die or are asked too much."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from typing import Any

import pytest

from bapipe.serve.app import ServeSettings, make_app
from bapipe.serve.planning_process import reply
from bapipe.serve.process_pool import BusyError, SlowError, Workers

SMALL = {"question": {"model": "alexnet", "cluster": "2xv100", "schedule": "data-parallel", "microbatch": "8"}}


def pid(workers: Workers) -> int:
    process: Any = workers._all[0]._process
    assert process is not None
    return int(process.pid)


def test_what_takes_too_long_is_ended_and_the_next_is_answered() -> None:
    async def story() -> None:
        workers = Workers(count=1, seconds=600.0, waiting=4)
        await workers.start()
        try:
            assert "parts" in await workers.ask(SMALL)
            first = pid(workers)
            os.kill(first, signal.SIGSTOP)  # it takes for ever, however fast the machine
            workers._seconds = 2.0  # for this question alone: others may take as long as a busy machine wants
            with pytest.raises(SlowError, match="this took longer than 2 s; force a schedule"):
                await workers.ask(SMALL)
            workers._seconds = 600.0
            assert "parts" in await workers.ask(SMALL)
            assert pid(workers) != first
            with pytest.raises(ProcessLookupError):
                os.kill(first, 0)
            os.kill(pid(workers), signal.SIGKILL)
            with pytest.raises(BusyError, match="ended before it answered; ask again"):
                await workers.ask(SMALL)
            assert "parts" in await workers.ask(SMALL)
            last = pid(workers)
        finally:
            await workers.stop()
        with pytest.raises(ProcessLookupError):
            os.kill(last, 0)

    asyncio.run(story())


def test_no_more_wait_than_may() -> None:
    async def story() -> None:
        workers = Workers(count=1, seconds=600.0, waiting=3)
        await workers.start()
        try:
            found = await asyncio.gather(*(workers.ask(SMALL) for _ in range(6)), return_exceptions=True)
        finally:
            await workers.stop()
        assert sum(isinstance(one, BusyError) for one in found) == 3
        assert sum(isinstance(one, dict) for one in found) == 3

    asyncio.run(story())


def test_what_needs_too_much_memory_is_refused() -> None:
    """In a process of its own, whose limit is what it has and a little more."""
    program = (
        "import sys\n"
        "from bapipe.serve.planning_process import limit_memory, reply, warm_up\n"
        "warm_up()\n"
        "size = int(open('/proc/self/statm').read().split()[0]) * 4096\n"
        "limit_memory(size + 150 * 2**20)\n"
        "job = {'question': {'model': 'gpt2', 'cluster': '8xv100', 'schedule': 'gpipe', 'strategy': 'uniform',"
        " 'global_batch': 65536}}\n"
        "print(reply(job)['error'])\n"
    )
    if not sys.platform.startswith("linux"):
        pytest.skip("address space is limited on Linux only")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith("so many actions need more memory than one question may take"), done.stderr


def test_our_own_mistakes_are_told_apart(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("bapipe.serve.planning_process.answer_parts", lambda *_, **__: 1 / 0)
    assert reply(SMALL)["status"] == 500
    assert "ZeroDivisionError" in capsys.readouterr().err


async def _question(app: Any, query: str, *, leaves: asyncio.Event | None = None) -> int:
    """Ask the application itself, as a client that goes when `leaves` is set; the status of the answer."""
    told: list[int] = []
    asked = False

    async def receive() -> dict[str, Any]:
        nonlocal asked
        if not asked:
            asked = True
            return {"type": "http.request", "body": b"", "more_body": False}
        await (leaves or asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            told.append(message["status"])

    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "GET", "path": "/api/plan",
        "raw_path": b"/api/plan", "query_string": query.encode(), "headers": [(b"host", b"127.0.0.1")],
        "server": ("127.0.0.1", 80), "client": ("127.0.0.1", 9), "scheme": "http", "root_path": "",
    }  # fmt: skip
    await app(scope, receive, send)
    return told[0]


def test_questions_of_clients_that_left_hold_up_no_one() -> None:
    quick = "model=alexnet&cluster=2xv100&schedule=data-parallel&microbatch="

    async def story() -> None:
        app = make_app(ServeSettings(workers=1, seconds=600.0, waiting=3))
        async with app.router.lifespan_context(app):
            workers = app.state.answers._workers
            assert await _question(app, quick + "1") == 200
            first = pid(workers)
            os.kill(first, signal.SIGSTOP)  # the question that it has takes for ever
            leave = asyncio.Event()
            gone = [asyncio.create_task(_question(app, quick + size, leaves=leave)) for size in ("2", "4", "8")]
            while workers._waiting < 2:
                await asyncio.sleep(0.01)
            stays = asyncio.create_task(_question(app, quick + "2"))
            stays_too = asyncio.create_task(_question(app, quick + "16"))
            while workers._waiting < 3:
                await asyncio.sleep(0.01)
            leave.set()
            assert await asyncio.gather(*gone) == [499] * 3
            while workers._waiting > 1:  # what waited for a process is given up at once
                await asyncio.sleep(0.01)
            os.kill(first, 0)  # one still wants the answer that the process is at
            stays.cancel()
            assert await stays_too == 200
            with pytest.raises(ProcessLookupError):
                os.kill(first, 0)
            assert await _question(app, quick + "2") == 200

    asyncio.run(story())
