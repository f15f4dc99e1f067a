"""One GPU cut into several by CUDA MPS: each slice has a share of the multiprocessors and a limit on memory.

MPS does not divide the memory's bandwidth: profile a slice while the others are loaded. Nothing here touches
clocks, power, compute mode or MIG. Imports no torch.
"""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bapipe.errors import BaPipeError, FileFormatError
from bapipe.io.cache_folder import cache_folder
from bapipe.io.files import dump_json, read_versioned, write_text
from bapipe.units import format_bytes

__all__ = [
    "SLICES_SCHEMA",
    "Slices",
    "describe",
    "even_slices",
    "exported",
    "slice_environment",
    "start",
    "status",
    "stop",
]

SLICES_SCHEMA = "bapipe.slices/1"
_CONTROL = "nvidia-cuda-mps-control"
_FEW, _QUEUES = 8, 8
"""slices up to which each asks for so many work queues, so that its copies need not queue behind its kernels

All clients of an MPS server share one pool of queues, of which each gets few where it asks for none.
"""
_PATIENCE = 20.0
"""seconds to wait for the daemon to answer or to go"""
_TRIES = 4
"""questions to a daemon before it is taken to be gone: it may refuse one while it answers another process"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slices:
    """How a GPU is cut."""

    schema: str = SLICES_SCHEMA
    gpu: int
    percentages: tuple[float, ...]
    """of the multiprocessors, one per slice; may differ"""
    memory: float | None = None
    """bytes that each slice may allocate; None: no limit"""
    folder: str
    """of the daemon's pipes and logs"""

    def __post_init__(self) -> None:
        if not self.percentages or any(not 0 < share <= 100 for share in self.percentages):
            raise BaPipeError(f"slices need shares over 0 and up to 100 %, got {list(self.percentages)[:16]}")
        if self.memory is not None and not self.memory >= 2**20:
            raise BaPipeError(f"a slice needs at least 1 MiB of memory, got {self.memory:g} bytes; raise it")

    def __len__(self) -> int:
        return len(self.percentages)


def even_slices(count: int) -> tuple[float, ...]:
    """So many equal shares."""
    if not 1 <= count <= 48:
        raise BaPipeError(f"a GPU can be cut into 1 to 48 slices (MPS serves 48 clients), got {count}")
    return (100 / count,) * count


def describe(slices: Slices, index: int) -> str:
    """A slice in words, which begin with its share: what a profile has as its environment."""
    memory = "" if slices.memory is None else f", {format_bytes(slices.memory)}"
    return f"{slices.percentages[index]:g} % of the multiprocessors by CUDA MPS{memory}"


def slice_environment(slices: Slices, index: int) -> dict[str, str]:
    """What a process needs in its environment, before it first uses CUDA, to run on that slice."""
    if not 0 <= index < len(slices):
        raise BaPipeError(f"there are slices 0 to {len(slices) - 1}, got {index}")
    variables = {
        "CUDA_VISIBLE_DEVICES": "0",
        "CUDA_MPS_PIPE_DIRECTORY": f"{slices.folder}/pipe",
        "CUDA_MPS_LOG_DIRECTORY": f"{slices.folder}/log",
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": f"{slices.percentages[index]:g}",
    }
    # NCCL refuses two ranks on one GPU, unless it takes them for hosts of their own.
    variables["NCCL_HOSTID"] = f"{socket.gethostname()}-gpu{slices.gpu}-slice{index}"
    if len(slices) <= _FEW:
        variables["CUDA_DEVICE_MAX_CONNECTIONS"] = str(_QUEUES)
    if slices.memory is not None:
        variables["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] = f"0={int(slices.memory // 2**20)}M"
    return variables


def _folder(gpu: int) -> Path:
    return cache_folder() / "mps" / f"gpu{gpu}"


def _state(gpu: int) -> Path:
    return _folder(gpu) / "slices.json"


def _daemon_environment(slices: Slices) -> dict[str, str]:
    return {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": str(slices.gpu),
        "CUDA_MPS_PIPE_DIRECTORY": f"{slices.folder}/pipe",
        "CUDA_MPS_LOG_DIRECTORY": f"{slices.folder}/log",
    }


def _require_gpu(gpu: int) -> None:
    if gpu < 0:
        raise BaPipeError(f"a GPU is counted from 0, got {gpu}")
    smi = shutil.which("nvidia-smi")
    found = None
    if smi is not None:
        found = subprocess.run([smi, "-L"], capture_output=True, text=True, timeout=60, check=False)
    if found is None or found.returncode or "GPU 0" not in found.stdout:
        raise BaPipeError("slices need an NVIDIA GPU, and nvidia-smi finds none here; run this where there is one")
    if f"GPU {gpu}:" not in found.stdout:
        raise BaPipeError(f"there is no GPU {gpu} here; nvidia-smi -L lists {found.stdout.count('GPU ')}")
    if shutil.which(_CONTROL) is None:
        raise BaPipeError(f"slices need {_CONTROL}, which comes with the NVIDIA driver and is not on the PATH")


def _command(slices: Slices, text: str) -> str | None:
    """What the daemon answers; None if it does not run."""
    try:
        done = subprocess.run(
            [_CONTROL],
            input=f"{text}\n",
            env=_daemon_environment(slices),
            capture_output=True,
            text=True,
            timeout=_PATIENCE,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def start(percentages: tuple[float, ...], *, memory: float | None = None, gpu: int = 0) -> Slices:
    """Start the MPS daemon for a GPU and remember how it is cut; with a daemon running only the cut changes."""
    slices = Slices(gpu=gpu, percentages=percentages, memory=memory, folder=str(_folder(gpu)))
    _require_gpu(gpu)
    _make_folder(Path(slices.folder))
    if _command(slices, "get_server_list") is None:
        done = subprocess.run(
            [_CONTROL, "-d"],
            env=_daemon_environment(slices),
            capture_output=True,
            text=True,
            timeout=_PATIENCE,
            check=False,
        )
        if done.returncode or not _answers(slices):
            said = " ".join((done.stderr or done.stdout).split())[:200] or "no reason given"
            raise BaPipeError(f"{_CONTROL} did not start: {said}; see {slices.folder}/log/control.log")
    write_text(_state(gpu), dump_json(slices))
    return slices


def _make_folder(folder: Path) -> None:
    """The folder of the daemon's pipes and logs, for this user alone: who writes to a pipe commands the daemon."""
    try:
        for each in (folder, folder / "pipe", folder / "log"):
            each.mkdir(parents=True, exist_ok=True)
            each.chmod(0o700)
    except OSError as error:
        raise BaPipeError(f"{folder} cannot be made: {error}; set BAPIPE_CACHE to a folder of yours") from None


def _answers(slices: Slices) -> bool:
    end = time.monotonic() + _PATIENCE
    while time.monotonic() < end:
        if _command(slices, "get_server_list") is not None:
            return True
        time.sleep(0.2)
    return False


def status(gpu: int = 0) -> Slices | None:
    """How the GPU is cut; None where no daemon of ours runs."""
    try:
        slices = read_versioned(Slices, _state(gpu), schema=SLICES_SCHEMA)
    except FileFormatError:
        return None
    return slices if shutil.which(_CONTROL) is not None and _runs(slices) else None


def _runs(slices: Slices) -> bool:
    """Whether the daemon answers."""
    for left in reversed(range(_TRIES)):
        if _command(slices, "get_server_list") is not None:
            return True
        if left:
            time.sleep(0.25)
    return False


def stop(gpu: int = 0) -> bool:
    """Stop the daemon; False where none of ours ran. Processes on slices must have ended before."""
    slices = status(gpu)
    if slices is None:
        _state(gpu).unlink(missing_ok=True)
        return False
    _command(slices, "quit")
    end = time.monotonic() + _PATIENCE
    while _command(slices, "get_server_list") is not None:
        if time.monotonic() > end:
            raise BaPipeError("the MPS daemon still runs: a process uses a slice; end it and stop again")
        time.sleep(0.2)
    _state(gpu).unlink(missing_ok=True)
    return True


def exported(variables: Mapping[str, str]) -> str:
    """The environment as lines for a shell, values quoted where a shell would take them apart."""
    return "\n".join(f"export {name}={shlex.quote(value)}" for name, value in variables.items())
