"""Links between ranks of this machine: torchrun measures, a cluster file is written. Uses no torch."""

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
    backend: str = "gloo",
    device: str = "cpu",
    largest: int = 2**26,
    seconds: float = 0.4,
    timeout: float = 300.0,
) -> LinkMeasurement:
    """Time messages between `ranks` processes of this machine: every pair of neighbours, and all together.

    Messages of 8 bytes to `largest`, each for about `seconds` one way, both ways at once, and reduced over all.

    gloo on CUDA carries through pinned memory of the host, as the runtime does, and several ranks may share a GPU.
    NCCL needs a GPU for each rank.
    """
    if not 2 <= ranks <= 64:
        raise BaPipeError(f"links are measured between 2 to 64 ranks, got {ranks}; correct --ranks")
    if backend not in ("gloo", "nccl"):
        raise BaPipeError(f"the backend is gloo or nccl, got '{backend[:60]}'")
    if device != "cpu" or backend == "nccl":
        device = "cuda"
        _require_gpus(ranks, backend)
    with tempfile.TemporaryDirectory(prefix="bapipe-links-") as folder:
        out = Path(folder) / "links.json"
        command = [sys.executable, "-m", "bapipe.torch.launch.torchrun_agent", str(os.getpid()), "--standalone"]
        command += [
            "--local-addr",
            "127.0.0.1",
            "--nproc-per-node",
            str(ranks),
            "-m",
            "bapipe.torch.profiler.link_worker",
            str(out),
        ]
        command += ["--backend", backend, "--device", device, "--largest", str(largest), "--seconds", str(seconds)]
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        if sys.platform == "linux":
            environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=timeout, check=False
            )
        except subprocess.TimeoutExpired:
            raise BaPipeError(f"the links were not measured within {timeout:g} s; use fewer ranks") from None
        if done.returncode or not out.is_file():
            raise BaPipeError(f"the links could not be measured: {_reason(done.stderr)}; try --backend gloo")
        return read_links(out)


def _require_gpus(ranks: int, backend: str) -> None:
    import torch

    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not found:
        raise BaPipeError(f"{backend} between GPUs needs one that torch can use, found none; use --device cpu")
    if backend == "nccl" and found < ranks:
        raise BaPipeError(
            f"NCCL needs a GPU for each rank ({ranks}), found {found}; use --backend gloo or fewer ranks"
        )


def _reason(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if "Error" in line and "ChildFailedError" not in line]
    return lines[-1][:200] if lines else "a rank failed"
