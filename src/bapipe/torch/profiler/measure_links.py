"""Links between ranks of this machine: processes measure, a cluster file is written. Uses no torch."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from bapipe.errors import BaPipeError
from bapipe.torch.profiler.link_record import LinkMeasurement, read_links

__all__ = ["measure_links"]


def measure_links(
    ranks: int,
    *,
    transport: str = "auto",
    device: str = "cpu",
    largest: int = 2**26,
    seconds: float = 0.2,
    timeout: float = 300.0,
) -> LinkMeasurement:
    """Time messages between `ranks` processes of this machine, through the transport that a run of theirs takes.

    Messages of 8 bytes to `largest`, each for about `seconds`: each way between neighbours, both ways at once, all
    neighbours at once, and sums over 2, 4, … and all ranks; the larger ones also while the ranks compute. With
    "cuda" every rank has a GPU of its own, or the slice of the first GPU of that number where it is cut.
    """
    if not 2 <= ranks <= 64:
        raise BaPipeError(f"links are measured between 2 to 64 ranks, got {ranks}; correct --ranks")
    if device != "cpu" or transport not in ("auto", "gloo"):
        device = "cuda"
        _require_gpus(transport)
    with tempfile.TemporaryDirectory(prefix="bapipe-links-") as folder:
        out = Path(folder) / "links.json"
        command = [sys.executable, "-m", "bapipe.torch.launch.local_ranks", str(os.getpid()), str(ranks)]
        command += ["-m", "bapipe.torch.profiler.link_worker", str(out)]
        command += [
            "--transport",
            transport,
            "--device",
            device,
            "--largest",
            str(largest),
            "--seconds",
            str(seconds),
        ]
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=timeout, check=False
            )
        except subprocess.TimeoutExpired:
            raise BaPipeError(f"the links were not measured within {timeout:g} s; use fewer ranks") from None
        if done.returncode or not out.is_file():
            raise BaPipeError(f"the links could not be measured: {_reason(done.stderr)}")
        return read_links(out)


def _require_gpus(transport: str) -> None:
    import torch

    if not torch.cuda.is_available():
        raise BaPipeError(
            f"links by {transport} on GPUs need one that torch can use, found none; use --device cpu"
        )


def _reason(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if "Error" in line and "ChildFailedError" not in line]
    own = next((line.partition("BaPipeError: ")[2] for line in lines if "BaPipeError: " in line), "")
    if own:
        return own
    return lines[-1][:200] if lines else "a rank failed"
