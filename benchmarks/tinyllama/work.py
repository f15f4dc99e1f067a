"""A folder of work on a machine that is cut into slices: rows, each of some commands within a time, and a log."""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bapipe.io.files import write_text
from bapipe.torch.profiler.detect_machine import cluster_text, detect
from bapipe.torch.profiler.measure_links import measure_links

__all__ = ["ROOT", "Work", "row_options"]

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


def row_options(description: str | None) -> argparse.ArgumentParser:
    """The options that all benchmarks of rows have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--budget", type=float, default=3600.0, help="seconds")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal on two CPU ranks")
    parser.add_argument("--cut-already", action="store_true", help="the slices are there, and stay")
    parser.add_argument("--rows", default="", help="words, separated by commas: rows that have one of them")
    return parser


class Work(ABC):
    """The folder of one machine, with what is known already."""

    def __init__(
        self,
        folder: Path,
        here: Path,
        *,
        tiny: bool,
        budget: float,
        ranks: int = 4,
        memory: str = "16GB",
        cut_already: bool = False,
    ) -> None:
        """`here` has the modules that commands name; `tiny`: a rehearsal on two CPU ranks, else there are so many
        slices of so much memory."""
        self.folder, self.here, self.tiny = folder.resolve(), here, tiny  # commands run in `here`
        self.device = "cpu" if tiny else "cuda"
        self.ranks = 2 if tiny else ranks
        self.memory = memory
        self.cut_already = cut_already
        """whether the slices are there, and stay"""
        self.end = time.monotonic() + budget
        signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # so that nothing is left running
        folder.mkdir(parents=True, exist_ok=True)
        path = os.pathsep.join([str(ROOT / "src"), str(here), os.environ.get("PYTHONPATH", "")])
        self.environment = {
            **os.environ,
            "PYTHONPATH": path,
            "GLOO_SOCKET_IFNAME": "lo",
            "NCCL_SOCKET_IFNAME": "lo",
        }

    @property
    def left(self) -> float:
        return self.end - time.monotonic()

    def run(self, *command: str, limit: float = math.inf) -> None:
        """Run to the end, within the time left and so many seconds; what it said goes to the log."""
        print(f"[{self.left:5.0f} s left] {' '.join(command)}"[:300], flush=True)
        begun = time.monotonic()
        with (self.folder / "log.txt").open("a") as log:
            print("$", *command, file=log, flush=True)
            process = subprocess.Popen(
                command, env=self.environment, cwd=self.here, stdout=log, stderr=log, start_new_session=True
            )
            try:
                code = process.wait(timeout=max(1.0, min(self.left, limit)))
            except subprocess.TimeoutExpired:
                raise RuntimeError("no time left" if self.left < limit else f"took over {limit:.0f} s") from None
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        print(f"    {time.monotonic() - begun:.0f} s, exit {code}", flush=True)
        if code:
            tail = (self.folder / "log.txt").read_text().splitlines()
            said = [line for line in tail if "Error" in line or line.startswith("bapipe: ")]
            raise RuntimeError((said or tail)[-1][:300])

    def bapipe(self, *words: str) -> None:
        self.run(sys.executable, "-m", "bapipe", *words)

    def cluster(self, transport: str, name: str = "cluster") -> Path:
        """The cluster file of that name with links as that transport has them."""
        path = self.folder / f"{name}-{transport}.toml"
        if not path.exists():
            chosen = "auto" if self.tiny else transport
            links = measure_links(self.ranks, transport=chosen, device=self.device, largest=2**24, seconds=0.04)
            write_text(path, cluster_text(detect(ranks=self.ranks, device=self.device), links))
            print(f"[{self.left:5.0f} s left] {links.reason}", flush=True)
        return path

    def start_slices(self) -> None:
        if not self.tiny and not self.cut_already:
            self.bapipe("slices", "start", "--count", str(self.ranks), "--memory", self.memory)

    def stop_slices(self) -> None:
        if not self.tiny and not self.cut_already:
            command = [sys.executable, "-m", "bapipe", "slices", "stop"]
            subprocess.run(command, env=self.environment, check=False)

    @abstractmethod
    def row(self, name: str) -> dict[str, Any]:
        """What the row of that name finds; RuntimeError or OSError where it fails."""

    def run_rows(
        self,
        names: Sequence[str],
        words: str,
        *,
        least: float,
        after: Callable[[dict[str, Any]], None] | None = None,
    ) -> dict[str, Any]:
        """Run the rows that are not known yet and have one of the words; a row that fails is a row, too.

        None is begun with less than `least` seconds left. result.json is written, and `after` called with all
        that is known, after each.
        """
        result = self.folder / "result.json"
        known: dict[str, Any] = json.loads(result.read_text()) if result.exists() else {}
        self.start_slices()
        try:
            for name in names:
                if name in known or not any(word in name for word in words.split(",")):
                    continue
                if self.left < least:
                    print(f"{name}: no time left", flush=True)
                    break
                try:
                    known[name] = self.row(name)
                    print(f"{name}: {_short(known[name])}", flush=True)
                except (RuntimeError, OSError) as error:
                    print(f"{name}: {error}", flush=True)
                    if "no time left" in str(error):
                        break
                    known[name] = {"error": str(error)[:300]}
                result.write_text(json.dumps(known, indent=1) + "\n")
                if after is not None:
                    after(known)
        finally:
            self.stop_slices()
        return known


def _short(row: dict[str, Any]) -> str:
    rate = row.get("samples_per_second")
    return json.dumps(row)[:300] if rate is None else f"{rate:.3f} samples/s"
