"""A cluster file of this machine: its GPUs, or its cores as ranks, and the links between them if measured."""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import groupby

import torch

from bapipe.errors import BaPipeError
from bapipe.hardware.catalog import load_catalog
from bapipe.hardware.cluster import Link
from bapipe.torch import slices
from bapipe.torch.profiler.environment import accelerator_name, environment_of
from bapipe.torch.profiler.link_record import (
    LinkMeasurement,
    collective_bandwidth,
    collective_rates,
    fsdp_units,
    links_of,
)

__all__ = ["AcceleratorGroup", "Machine", "cluster_text", "detect", "usable_memory"]

_SIDE = 1024
"""of the matrices whose product tells the compute rate"""
_COPY = 2**27
"""bytes of the copy that tells the memory's"""
_CONTEXT, _SCATTERED = 0.5e9, 0.05
"""of a GPU's memory: bytes that CUDA has, and the share that torch's allocator holds in pieces too small to use"""


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceleratorGroup:
    """Neighbouring accelerators of one type."""

    type: str
    description: str
    device: str
    """the first of this type, as `bapipe profile --device` names it"""
    count: int
    memory: float
    """bytes of each that training may use"""
    memory_bandwidth: float
    """bytes/s"""
    flops: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The accelerators of this machine, in their order."""

    node: str
    kind: str
    """gpu or cpu"""
    groups: tuple[AcceleratorGroup, ...]
    cut: bool = False
    """whether they are slices of one GPU"""

    @property
    def count(self) -> int:
        """How many accelerators there are."""
        return sum(group.count for group in self.groups)

    @property
    def types(self) -> tuple[str, ...]:
        """Each type of accelerator once."""
        return tuple(dict.fromkeys(group.type for group in self.groups))

    def __str__(self) -> str:
        return " + ".join(f"{group.count} × {group.type}" for group in self.groups)


def detect(*, ranks: int | None = None, threads: int = 1, device: str | None = None) -> Machine:
    """The GPUs that torch sees, of one type or several; else, or if `device` is cpu, the CPU as `ranks` of
    `threads` threads.

    Rates are measured with a large product and a large copy on one of each type, in under two seconds each.
    """
    node = re.sub(r"[^A-Za-z0-9_.-]+", "-", socket.gethostname())[:60].strip("-") or "node0"
    if device != "cpu" and torch.cuda.is_available():
        cut = slices.status(0)
        if cut is not None and ranks in (None, len(cut)):
            return _sliced(node, torch.device("cuda", 0), cut)
        return _gpus(node, ranks or torch.cuda.device_count())
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
        group = AcceleratorGroup(
            type=accelerator_name(own),
            description=str(own),
            device="cpu",
            count=count,
            memory=memory / count,
            memory_bandwidth=_copy_rate(cpu),
            flops={"fp32": _product_rate(cpu, torch.float32), "fp64": _product_rate(cpu, torch.float64)},
        )
        return Machine(node=node, kind="cpu", groups=(group,))
    finally:
        torch.set_num_threads(before)


def _sliced(node: str, gpu: torch.device, cut: slices.Slices) -> Machine:
    """Slices of one GPU, each under the type that a profile of such a slice has."""
    whole = torch.cuda.get_device_properties(gpu).total_memory if cut.memory is None else 0
    copying = _copy_rate(gpu)
    rates = {name: _product_rate(gpu, kind) for name, kind in _KINDS.items()}
    groups = []
    for percentage, members in groupby(range(len(cut)), key=lambda index: cut.percentages[index]):
        indices, share = list(members), percentage / 100
        own = environment_of(gpu, slice_=slices.describe(cut, indices[0]))
        groups.append(
            AcceleratorGroup(
                type=accelerator_name(own),
                description=str(own),
                device=str(gpu),
                count=len(indices),
                memory=usable_memory(cut.memory or whole * share),
                memory_bandwidth=share * copying,
                flops={name: share * rate for name, rate in rates.items()},
            )
        )
    return Machine(node=node, kind="gpu", groups=tuple(groups), cut=True)


def _gpus(node: str, ranks: int) -> Machine:
    """Rank after rank on the next GPU; where there are more ranks than GPUs, they begin again with the first."""
    seen = torch.cuda.device_count()
    devices = [torch.device("cuda", rank % seen) for rank in range(ranks)]
    environments = [environment_of(device) for device in devices]
    names = [accelerator_name(own) for own in environments]
    groups, known = [], dict[str, AcceleratorGroup]()
    for name, members in groupby(range(ranks), key=lambda rank: names[rank]):
        first, *others = members
        if name not in known:
            alike = [device for device, own in zip(devices, names, strict=True) if own == name]
            known[name] = AcceleratorGroup(
                type=name,
                description=str(environments[first]),
                device=str(devices[first]),
                count=1,
                memory=usable_memory(min(torch.cuda.get_device_properties(own).total_memory for own in alike)),
                memory_bandwidth=_copy_rate(devices[first]),
                flops={kind: _product_rate(devices[first], dtype) for kind, dtype in _KINDS.items()},
            )
        groups.append(replace(known[name], count=1 + len(others)))
    return Machine(node=node, kind="gpu", groups=tuple(groups))


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
    for group in machine.groups:
        lines += ["[[accelerators]]", f"type = {json.dumps(group.type)}", f"count = {group.count}"]
        lines += [f"node = {json.dumps(machine.node)}", ""]
    for group in {group.type: group for group in machine.groups}.values():
        if machine.kind == "cpu" or group.type not in load_catalog():
            lines += _type_lines(group, machine.kind, linked=links is not None)
    if links is not None:
        lines += _link_lines(machine, links)
    return "\n".join(lines) + "\n"


def _type_lines(group: AcceleratorGroup, kind: str, *, linked: bool) -> list[str]:
    lines = [f"[types.{json.dumps(group.type)}]", f"kind = {json.dumps(kind)}"]
    lines += [
        f"memory = {_rounded(group.memory)}",
        f"memory_bandwidth = {_rounded(group.memory_bandwidth)}",
    ]
    flops = ", ".join(f"{name} = {_rounded(value)}" for name, value in group.flops.items())
    lines += [f"flops = {{ {flops} }}"]
    if not linked:
        lines += ['link_bandwidth = "1 GB/s"']
    lines += ["", f"[types.{json.dumps(group.type)}.sources]"]
    lines += [f"flops = {json.dumps('measured: a product of large matrices; ' + group.description)}"]
    lines += ['memory_bandwidth = "measured: a large copy, bytes read and written"']
    if not linked:
        lines += ['link_bandwidth = "assumption; measure it with bapipe profile --links"']
    return [*lines, ""]


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
        lines += ["[collective]", f"bandwidth = {_rounded(rate)}"]
        if measured.overlap is not None:
            lines.append(f"overlap = {measured.overlap:.3g}")
        known = collective_rates(measured).known
        lines += [*(f"{name} = {_rounded(own)}" for name, own in known.items()), ""]
    units = fsdp_units(measured)
    if units is not None:
        lines += ["[fsdp.gather]", *_entries(units.gather), "", "[fsdp.scatter]", *_entries(units.scatter), ""]
    return lines


def _entries(link: Link) -> list[str]:
    return [
        f"bandwidth = {_rounded(link.bandwidth)}",
        f"latency = {link.latency:.3g}",
        f'duplex = "{link.duplex}"',
    ]


def _rounded(value: float) -> str:
    return repr(float(f"{value:.4g}"))
