"""The ranks of all cases, asked one thing after another; those that fail are started anew."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from machine import Machine

from bapipe.torch.slices.mps import slice_environment

__all__ = ["Workers"]

_SHOWN = 1500
"""characters of a rank's log that are shown where something fails"""


class Workers:
    """One process per slice. A request is for all of them, or for those in `slices`, in the order of their ranks;
    rank 0 answers."""

    def __init__(self, folder: Path, machine: Machine) -> None:
        """`folder` is for what goes between them; it is removed when they stop."""
        self._folder, self._machine = folder.resolve(), machine
        self._processes: list[subprocess.Popen[bytes]] = []
        self._asked = 0
        self._start()

    def _start(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)
        self._asked = 0
        cut = self._machine.start()
        count = len(self._machine)
        limit = f"{self._machine.memory:.0f}" if self._machine.limited else "0"
        command = [sys.executable, str(Path(__file__).with_name("worker.py")), str(self._folder)]
        self._processes = []
        for rank in range(count):
            own = {} if cut is None else slice_environment(cut, rank)
            environment = {**os.environ, **own, "PYTHONFAULTHANDLER": "1"}
            environment |= {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(count)}
            environment |= {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // count))}
            environment |= {"GLOO_SOCKET_IFNAME": "lo", "LOCAL_WORLD_SIZE": str(count)}
            with (self._folder / f"log-{rank}").open("w") as log:
                self._processes.append(
                    subprocess.Popen(
                        [*command, self._machine.device, limit], env=environment, stderr=log, stdout=log
                    )
                )

    def ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Rank 0's answer. Where a rank dies or the time is up: the `error` on one line, and the ends of what the
        ranks have said, which go to standard error, too; the next request finds new workers."""
        if self._dead():  # of what was asked before
            self._start_anew()
        number = self._asked
        self._asked += 1
        _write(self._folder / f"request-{number}.json", request)
        answer = self._folder / f"answer-{number}.json"
        end = time.monotonic() + seconds
        while not answer.exists():
            if self._dead() or time.monotonic() > end:
                time.sleep(1.0)  # for the last words of the others
                return self._failed(number, seconds)
            time.sleep(0.05)
        found: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
        return found

    def _dead(self) -> list[int]:
        return [rank for rank, item in enumerate(self._processes) if item.poll() is not None]

    def _failed(self, number: int, seconds: float) -> dict[str, Any]:
        dead = self._dead()
        told = self._told(dead or list(range(len(self._processes))))
        words = [json.loads(path.read_text()) for path in self._folder.glob(f"failure-{number}-*.json")]
        first = min(words, key=lambda word: float(word["at"]), default=None)
        if first is not None:
            error = f"rank {first['rank']}: {first['error']}"
        elif dead:
            lines = [line for line in self._log(dead[0]).splitlines() if line.strip()]
            error = f"ranks {dead} ended: {lines[-1][:300] if lines else 'without a word'}"
        else:
            error = f"no answer within {seconds:.0f} s"
        print(f"{error}\n{told}", file=sys.stderr, flush=True)
        self._kill()
        return {"error": error, "log": told}

    def _start_anew(self) -> None:
        self._kill()
        self._machine.stop()  # MPS's server may have failed with a client that was killed within a kernel
        self._start()

    def _log(self, rank: int) -> str:
        return (self._folder / f"log-{rank}").read_text(encoding="utf-8", errors="replace")

    def _told(self, ranks: list[int]) -> str:
        """The end of what these ranks have said; of a live one where it stands."""
        live = [rank for rank in ranks if self._processes[rank].poll() is None]
        for rank in live:
            self._processes[rank].send_signal(signal.SIGUSR1)
        if live:
            time.sleep(1.0)
        return "\n".join(f"[rank {rank}] {self._log(rank)[-_SHOWN:]}" for rank in ranks)

    def _kill(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.wait()

    def stop(self) -> None:
        """End the workers and what they ran on."""
        _write(self._folder / f"request-{self._asked}.json", {"stop": True})
        deadline = time.monotonic() + 15
        while time.monotonic() < deadline and len(self._dead()) < len(self._processes):
            time.sleep(0.05)
        self._kill()
        shutil.rmtree(self._folder, ignore_errors=True)
        self._machine.stop()

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self.stop()


def _write(path: Path, value: dict[str, Any]) -> None:
    """All at once, for readers that wait for it."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(value), encoding="utf-8")
    part.rename(path)
