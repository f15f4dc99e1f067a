"""A cluster file of this machine: its GPUs, or its cores as ranks, and the links between them if measured."""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from bapipe.errors import BaPipeError
from bapipe.hardware.catalog import load_catalog
from bapipe.hardware.cluster import Link
from bapipe.torch import slices
from bapipe.torch.profiler.environment import accelerator_name, environment_of
from bapipe.torch.profiler.link_record import LinkMeasurement, collective_bandwidth, links_of

__all__ = ["Machine", "cluster_text", "detect", "usable_memory"]

_SIDE = 1024
"""of the matrices whose product tells the compute rate"""
_COPY = 2**27
"""bytes of the copy that tells the memory's"""
_CONTEXT, _SCATTERED = 0.5e9, 0.05
"""of a GPU's memory: bytes that CUDA has, and the share that torch's allocator holds in pieces too small to use"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Equal accelerators of this machine."""

    node: str
    kind: str
    """gpu or cpu"""
    type: str
    description: str
    count: int
    memory: float
    """bytes of each that training may use"""
    memory_bandwidth: float
    """bytes/s"""
    flops: Mapping[str, float]


def detect(*, ranks: int | None = None, threads: int = 1, device: str | None = None) -> Machine:
    """The GPUs that torch sees, all taken to be like the first; else, or if `device` is cpu, the CPU as `ranks` of
    `threads` threads.

    Rates are measured with a large product and a large copy, in under two seconds.
    """
    node = re.sub(r"[^A-Za-z0-9_.-]+", "-", socket.gethostname())[:60].strip("-") or "node0"
    if device != "cpu" and torch.cuda.is_available():
        gpu = torch.device("cuda", 0)
        cut = slices.status(0)
        if cut is not None and ranks in (None, len(cut)):
            return _sliced(node, gpu, cut)
        own = environment_of(gpu)
        return Machine(
            node=node,
            kind="gpu",
            type=accelerator_name(own),
            description=str(own),
            count=ranks or torch.cuda.device_count(),
            memory=usable_memory(torch.cuda.get_device_properties(gpu).total_memory),
            memory_bandwidth=_copy_rate(gpu),
            flops={name: _product_rate(gpu, kind) for name, kind in _KINDS.items()},
        )
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if threads < 1 or threads > cores:
        raise BaPipeError(f"a rank can have 1 to {cores} threads here, got {threads}; correct --threads")
    count = ranks or max(1, cores // threads)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        cpu = torch.device("cpu")
        own = environment_of(cpu)
        memory = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
        return Machine(
            node=node,
            kind="cpu",
            type=accelerator_name(own),
            description=str(own),
            count=count,
            memory=memory / count,
            memory_bandwidth=_copy_rate(cpu),
            flops={"fp32": _product_rate(cpu, torch.float32), "fp64": _product_rate(cpu, torch.float64)},
        )
    finally:
        torch.set_num_threads(before)


def _sliced(node: str, gpu: torch.device, cut: slices.Slices) -> Machine:
    """Equal slices of one GPU, under the type that a profile of a slice has."""
    shares = set(cut.percentages)
    if len(shares) > 1:
        raise BaPipeError(
            f"the GPU is cut into unequal slices of {', '.join(f'{item:g}' for item in cut.percentages)} %; write "
            "the cluster file by hand, or cut it evenly (bapipe slices start --count N)"
        )
    own = environment_of(gpu, slice_=slices.describe(cut, 0))
    share = shares.pop() / 100
    memory = cut.memory or torch.cuda.get_device_properties(gpu).total_memory * share
    return Machine(
        node=node,
        kind="gpu",
        type=accelerator_name(own),
        description=str(own),
        count=len(cut),
        memory=usable_memory(memory),
        memory_bandwidth=share * _copy_rate(gpu),
        flops={name: share * _product_rate(gpu, kind) for name, kind in _KINDS.items()},
    )


def usable_memory(memory: float) -> float:
    """Bytes for training on a GPU or a slice of so much memory: what a plan may count on, half of it at least."""
    return max((1 - _SCATTERED) * memory - _CONTEXT, memory / 2)


_KINDS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def _best(action: Callable[[], object], device: torch.device) -> float:
    """The shortest of a few, after one to warm up."""
    times = []
    for _ in range(6):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return max(1e-9, min(times[1:]))


def _product_rate(device: torch.device, dtype: torch.dtype) -> float:
    side = 8 * _SIDE if device.type == "cuda" else _SIDE
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    return 2 * side**3 / _best(lambda: torch.mm(left, right), device)


def _copy_rate(device: torch.device) -> float:
    count = _COPY * (8 if device.type == "cuda" else 1) // 4
    source, target = torch.ones(count, device=device), torch.empty(count, device=device)
    return 2 * source.nbytes / _best(lambda: target.copy_(source), device)


def cluster_text(machine: Machine, links: LinkMeasurement | None = None) -> str:
    """The cluster file: catalogue types by name, others with their measured rates."""
    lines = ['schema = "bapipe.cluster/1"', f"name = {json.dumps(machine.node)}", ""]
    lines += ["[[accelerators]]", f"type = {json.dumps(machine.type)}", f"count = {machine.count}"]
    lines += [f"node = {json.dumps(machine.node)}", ""]
    if machine.kind == "cpu" or machine.type not in load_catalog():
        lines += [f"[types.{json.dumps(machine.type)}]", f"kind = {json.dumps(machine.kind)}"]
        lines += [
            f"memory = {_rounded(machine.memory)}",
            f"memory_bandwidth = {_rounded(machine.memory_bandwidth)}",
        ]
        flops = ", ".join(f"{name} = {_rounded(value)}" for name, value in machine.flops.items())
        lines += [f"flops = {{ {flops} }}"]
        if links is None:
            lines += ['link_bandwidth = "1 GB/s"']
        lines += ["", f"[types.{json.dumps(machine.type)}.sources]"]
        lines += [f"flops = {json.dumps('measured: a product of large matrices; ' + machine.description)}"]
        lines += ['memory_bandwidth = "measured: a large copy, bytes read and written"']
        if links is None:
            lines += ['link_bandwidth = "assumption; measure it with bapipe profile --links"']
        lines += [""]
    if links is not None:
        lines += _link_lines(machine, links)
    return "\n".join(lines) + "\n"


def _link_lines(machine: Machine, measured: LinkMeasurement) -> list[str]:
    links = links_of(measured)
    slowest = min(links.values(), key=lambda link: link.bandwidth)
    how = f"measured: {measured.backend} between {measured.ranks} ranks, {measured.device}"
    lines = [f"# {how}", "[links.within]", *_entries(slowest), ""]
    for (first, second), link in links.items():
        if link.bandwidth > 1.25 * slowest.bandwidth:
            names = json.dumps([f"{machine.node}/{first}", f"{machine.node}/{second}"])
            lines += ["[[links.pair]]", f"between = {names}", *_entries(link), ""]
    rate = collective_bandwidth(measured)
    if rate is not None:
        lines += ["[collective]", f"bandwidth = {_rounded(rate)}", ""]
    return lines


def _entries(link: Link) -> list[str]:
    return [
        f"bandwidth = {_rounded(link.bandwidth)}",
        f"latency = {link.latency:.3g}",
        f'duplex = "{link.duplex}"',
    ]


def _rounded(value: float) -> str:
    return repr(float(f"{value:.4g}"))
