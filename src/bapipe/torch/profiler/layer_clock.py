"""Clocks: the host's, and a GPU's with the work queued behind a delay, so that launching does not count."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

__all__ = ["Clock", "CudaClock", "HostClock", "Lap", "clock_of"]

_PRODUCT = 1024
"""side of the matrices whose product is the unit of delay"""
_USUAL_CACHE = 2**23
_LARGEST_CACHE = 2**27
_LONGEST = 0.25
"""seconds of delay that are tried before a layer is taken to wait for the device itself"""


@dataclass(frozen=True, slots=True)
class Lap:
    """Time between two marks."""

    host: float
    device: float | None
    """None: no device, or its time could not be separated from the host's"""


class Clock(Protocol):
    """`begin`, then `mark` around each part, then `read`: one lap per pair of neighbouring marks."""

    def begin(self) -> None:
        """Wait until all is idle and get ready."""

    def chill(self, warm: Sequence[Tensor]) -> None:
        """Read more than the caches hold, then the `warm` tensors.

        In a step a layer finds what the one before it made in the cache, and its weights long gone from it;
        repeated alone, it would find them there.
        """

    def mark(self) -> None:
        """Note the time."""

    def read(self) -> list[Lap] | None:
        """The laps; None where this sample is void and must be taken again."""


def _cache_bytes(device: torch.device) -> int:
    """The largest cache of the device; where that is not known, what is usual."""
    if device.type == "cuda":
        return int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)) or 2**26
    sizes = [_USUAL_CACHE]
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = file.read_text(encoding="ascii", errors="replace").strip()
        if text[:-1].isdigit() and text[-1:] in ("K", "M"):
            sizes.append(int(text[:-1]) * (2**10 if text[-1] == "K" else 2**20))
    return min(max(sizes), _LARGEST_CACHE)


def _read(tensors: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for tensor in tensors:
            if tensor.is_floating_point() and tensor.numel():
                tensor.amax()


class _Mark(NamedTuple):
    """When the wait for a core was read, and how long that was until then, in seconds."""

    before: float
    waited: float
    after: float


def _worked(start: _Mark, end: _Mark) -> float:
    """Seconds between two marks less the wait for a core, where that is not longer than what passed."""
    passed, waited = end.before - start.after, end.waited - start.waited
    if waited <= 0:
        return passed
    worked = end.after - start.before - waited
    return min(passed, worked) if worked > 0 else passed


class HostClock:
    """perf_counter, less the time for which the system let others have this thread's core.

    Linux counts that wait; without it a busy machine would lengthen a whole step, which never escapes, but not the
    median of a short layer, which often does. Other threads' waits are not seen: they count.

    The wait is read at each end of a lap, and the thread may lose its core between that and reading the time. So a
    lap with a wait is timed from before the first reading to after the second: no wait is taken off that was not
    timed.
    """

    def __init__(self) -> None:
        self.laps: list[Lap] = []
        self.last: _Mark | None = None
        self.filler = torch.zeros(5 * _cache_bytes(torch.device("cpu")) // 16, dtype=torch.float32)
        try:
            self.statistics = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        except OSError:
            self.statistics = -1

    def __del__(self) -> None:
        if self.statistics >= 0:
            os.close(self.statistics)

    def _waited(self) -> float:
        if self.statistics < 0:
            return 0.0
        return int(os.pread(self.statistics, 100, 0).split()[1]) / 1e9

    def begin(self) -> None:
        self.laps.clear()
        self.last = None

    def chill(self, warm: Sequence[Tensor]) -> None:
        self.filler.sum()
        _read(warm)

    def mark(self) -> None:
        mark = _Mark(time.perf_counter(), self._waited(), time.perf_counter())
        if self.last is not None:
            self.laps.append(Lap(_worked(self.last, mark), None))
        self.last = mark

    def read(self) -> list[Lap]:
        return list(self.laps)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class CudaClock:
    """CUDA events behind a delay, and perf_counter for how long issuing took.

    Before each sample the device is given matrix products to chew on for longer than the host needs to issue what
    is timed, so events measure the device alone, back to back. A sample that the delay was too short for is void,
    and the next delay longer; where no delay is long enough the timed code waits for the device, and from then on
    the time from idle to idle is taken as the host's.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.left = torch.randn(_PRODUCT, _PRODUCT, device=device)
        self.right = torch.randn(_PRODUCT, _PRODUCT, device=device)
        self.result = torch.empty(_PRODUCT, _PRODUCT, device=device)
        self.filler = torch.zeros(2 * _cache_bytes(device) // 4, device=device)
        self.unit = self._time_unit()
        self.delay = 1e-3
        self.waits = False
        self.hosts: list[float] = []
        self.events: list[torch.cuda.Event] = []

    def _product(self) -> Tensor:
        return torch.mm(self.left, self.right, out=self.result)

    def _time_unit(self) -> float:
        for _ in range(3):
            self._product()
        start, end = _event(), _event()
        torch.cuda.synchronize(self.device)
        start.record()
        for _ in range(20):
            self._product()
        end.record()
        end.synchronize()
        return max(1e-6, float(start.elapsed_time(end)) / 1e3 / 20)

    def begin(self) -> None:
        self.hosts.clear()
        self.events.clear()
        torch.cuda.synchronize(self.device)
        if not self.waits:
            for _ in range(max(1, int(self.delay / self.unit + 1))):
                self._product()

    def chill(self, warm: Sequence[Tensor]) -> None:
        self.filler.sum()
        _read(warm)

    def mark(self) -> None:
        if self.waits:
            torch.cuda.synchronize(self.device)
        event = _event()
        event.record()
        self.events.append(event)
        self.hosts.append(time.perf_counter())

    def read(self) -> list[Lap] | None:
        late = bool(self.events[0].query())  # type: ignore[no-untyped-call]
        torch.cuda.synchronize(self.device)
        hosts = [end - start for start, end in zip(self.hosts, self.hosts[1:], strict=False)]
        if self.waits:
            return [Lap(host, None) for host in hosts]
        if late:
            needed = max(2 * self.delay, 1.5 * sum(hosts))
            if self.delay >= _LONGEST:
                self.waits = True
            self.delay = min(needed, _LONGEST)
            return None
        self.delay = max(1e-4, 0.9 * self.delay + 0.1 * 2 * sum(hosts))
        pairs = zip(self.events, self.events[1:], strict=False)
        return [Lap(host, start.elapsed_time(end) / 1e3) for host, (start, end) in zip(hosts, pairs, strict=True)]

    def reset(self) -> None:
        """Forget what the last layer needed."""
        self.delay, self.waits = 1e-3, False


def clock_of(device: torch.device) -> HostClock | CudaClock:
    """The clock to time that device with."""
    return CudaClock(device) if device.type == "cuda" else HostClock()
