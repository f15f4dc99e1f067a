"""A folder of work on a machine that is cut into slices: commands within a time, and what they said in a log."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from bapipe.io.files import write_text
from bapipe.torch.profiler.detect_machine import cluster_text, detect
from bapipe.torch.profiler.measure_links import measure_links

__all__ = ["ROOT", "Work"]

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


class Work:
    """The folder of one machine, with what is known already."""

    def __init__(self, folder: Path, here: Path, *, tiny: bool, budget: float) -> None:
        """`here` has the modules that commands name; `tiny`: a rehearsal on two CPU ranks."""
        self.folder, self.here, self.tiny = folder, here, tiny
        self.device = "cpu" if tiny else "cuda"
        self.ranks = 2 if tiny else 4
        self.end = time.monotonic() + budget
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

    def run(self, *command: str) -> None:
        """Run to the end, within the time left; what it said goes to the log."""
        print(f"[{self.left:5.0f} s left] {' '.join(command)}"[:300], flush=True)
        begun = time.monotonic()
        with (self.folder / "log.txt").open("a") as log:
            print("$", *command, file=log, flush=True)
            process = subprocess.Popen(
                command, env=self.environment, cwd=self.here, stdout=log, stderr=log, start_new_session=True
            )
            try:
                code = process.wait(timeout=max(1.0, self.left))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                raise RuntimeError("no time left") from None
        print(f"    {time.monotonic() - begun:.0f} s, exit {code}", flush=True)
        if code:
            tail = (self.folder / "log.txt").read_text().splitlines()
            said = [line for line in tail if "Error" in line or line.startswith("bapipe: ")]
            raise RuntimeError((said or tail)[-1][:300])

    def bapipe(self, *words: str) -> None:
        self.run(sys.executable, "-m", "bapipe", *words)

    def cluster(self, transport: str) -> Path:
        """The cluster file with links as that transport has them."""
        path = self.folder / f"cluster-{transport}.toml"
        if not path.exists():
            name = "auto" if self.tiny else transport
            links = measure_links(self.ranks, transport=name, device=self.device, largest=2**24, seconds=0.04)
            write_text(path, cluster_text(detect(ranks=self.ranks, device=self.device), links))
            print(f"[{self.left:5.0f} s left] {links.reason}", flush=True)
        return path

    def start_slices(self) -> None:
        if not self.tiny:
            self.bapipe("slices", "start", "--count", str(self.ranks), "--memory", "16GB")

    def stop_slices(self) -> None:
        if not self.tiny:
            command = [sys.executable, "-m", "bapipe", "slices", "stop"]
            subprocess.run(command, env=self.environment, check=False)
