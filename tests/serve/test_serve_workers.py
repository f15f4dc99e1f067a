"""Planning processes that take too long, die or are asked too much."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from typing import Any

import pytest

from bapipe.serve.planning_process import reply
from bapipe.serve.process_pool import BusyError, SlowError, Workers

SMALL = {"question": {"model": "alexnet", "cluster": "2xv100", "schedule": "data-parallel", "microbatch": "8"}}


def pid(workers: Workers) -> int:
    process: Any = workers._all[0]._process
    assert process is not None
    return int(process.pid)


def test_what_takes_too_long_is_ended_and_the_next_is_answered() -> None:
    async def story() -> None:
        workers = Workers(count=1, seconds=5.0, waiting=4)
        await workers.start()
        try:
            assert "parts" in await workers.ask(SMALL)
            first = pid(workers)
            os.kill(first, signal.SIGSTOP)  # it takes for ever, however fast the machine
            with pytest.raises(SlowError, match="this took longer than 5 s; force a schedule"):
                await workers.ask(SMALL)
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
        workers = Workers(count=1, seconds=60.0, waiting=3)
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
        " 'minibatch': 65536}}\n"
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
