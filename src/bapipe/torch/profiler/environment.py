"""Devices, and what to say of the machine."""

from __future__ import annotations

import os
import platform
import re

import torch

from bapipe.errors import BaPipeError, nearest
from bapipe.hardware.catalog import catalog_aliases, load_catalog
from bapipe.hardware.cpu_types import cpu_type
from bapipe.hardware.slice_types import slice_type
from bapipe.torch.device.take_device import take_device
from bapipe.torch.profiler.measurement import Environment

__all__ = ["accelerator_name", "cpu_name", "environment_of", "find_device"]


def find_device(name: str) -> torch.device:
    """The device of that name, if this machine has it."""
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdigit()) or (kind == "cpu" and index):
        raise BaPipeError(f"a device is cpu, cuda or cuda:N, got '{name[:60]}'{nearest(name, ('cpu', 'cuda'))}")
    if kind == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise BaPipeError(f"there is no CUDA device here (torch {torch.__version__}); use --device cpu")
    count = torch.cuda.device_count()
    if int(index or 0) >= count:
        raise BaPipeError(f"there is no device cuda:{index}: this machine has {count}; use cuda:{count - 1}")
    device = torch.device("cuda", int(index or 0))
    take_device(device)
    return device


def environment_of(device: torch.device, *, slice_: str = "") -> Environment:
    """This machine as it is now."""
    cuda = device.type == "cuda"
    return Environment(
        device=device.type,
        name=torch.cuda.get_device_name(device) if cuda else cpu_name(),
        torch=str(torch.__version__),
        threads=torch.get_num_threads(),
        driver=_driver() if cuda else "",
        slice=slice_,
    )


def cpu_name() -> str:
    """The processor as Linux names it, and the cores that this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    name = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as stream:
            found = re.search(r"^model name\s*:\s*(.+)$", stream.read(1 << 16), re.MULTILINE)
        name = found[1].strip() if found else name
    except OSError:
        pass
    return f"{name} ({cores} cores)"


def _driver() -> str:
    try:
        with open("/proc/driver/nvidia/version", encoding="utf-8", errors="replace") as stream:
            found = re.search(r"\b(\d{3,}\.\d+(?:\.\d+)?)\b", stream.read(4096))
        return found[1] if found else f"CUDA {torch.version.cuda}"
    except OSError:
        return f"CUDA {torch.version.cuda}"


def accelerator_name(environment: Environment) -> str:
    """The accelerator type to file the costs under: the catalogue's name where the device is in it.

    One thread of a CPU is the catalogue's cpu-core, several are cpu-Ncore; a slice has its share appended. An
    unknown GPU is its own name in small letters.
    """
    if environment.device == "cpu":
        return cpu_type(environment.threads)
    words = re.findall(r"[a-z0-9]+", environment.name.lower())
    aliases = catalog_aliases()
    known = {**{name: name for name in load_catalog()}, **aliases}
    memory = re.search(r"(\d+)\s*gb", environment.name.lower())
    name = next((known[word] for word in words if word in known), "-".join(words))
    for family in words:
        sized = f"{family}-{memory[1]}" if memory else ""
        name = known.get(sized, name)
    if "rtx" in words:
        joined = "".join(words[words.index("rtx") : words.index("rtx") + 2])
        name = known.get(joined, name)
    share = re.match(r"([\d.]+) %", environment.slice)
    return slice_type(name, share[1]) if share else name
