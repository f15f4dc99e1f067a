"""A chain of network namespaces with a full-duplex link between neighbours, as if each were a machine.

    rank 0  next ── prev  rank 1  next ── prev  rank 2 …

Every rank has one address, which all others reach; what is not for a neighbour is forwarded along the chain. Each
end of a link can be shaped with tc's token bucket. Needs root and iproute2.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bapipe.errors import BaPipeError

__all__ = ["Chain", "chain", "why_not"]

_MTU = 9000
"""jumbo frames: a sixth of the packets, so that the kernel's work does not take the cores from the ranks"""
_BURST = 20_000
"""bytes; little against a message, for what the bucket holds is sent at once"""


def why_not() -> str | None:
    """Why this machine cannot make namespaces; None if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    return f"{' and '.join(missing)} of iproute2 not found" if missing else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """Namespaces that exist, in the order of the chain."""

    names: tuple[str, ...]

    def enter(self, rank: int) -> list[str]:
        """What to put before a command so that it runs there."""
        return ["ip", "netns", "exec", self.names[rank]]

    def interface(self, rank: int) -> str:
        """The interface with the rank's address."""
        return "prev" if rank else "next"

    def shape(self, rate: str | None) -> None:
        """Limit every direction of every link, such as to "500mbit"; None: as fast as it goes."""
        for name, interface in self._ends():
            subprocess.run(
                ["tc", "-n", name, "qdisc", "del", "dev", interface, "root"], check=False, capture_output=True
            )
            if rate is not None:
                bucket = ["tbf", "rate", rate, "burst", str(_BURST), "latency", "400ms"]
                _call(["tc", "-n", name, "qdisc", "add", "dev", interface, "root", *bucket])

    def _ends(self) -> Iterator[tuple[str, str]]:
        for rank in range(len(self.names) - 1):
            yield self.names[rank], "next"
            yield self.names[rank + 1], "prev"


@contextlib.contextmanager
def chain(ranks: int) -> Iterator[Chain]:
    """Make the namespaces; whatever happens within, they are gone afterwards."""
    reason = why_not()
    if reason is not None:
        raise BaPipeError(f"no links between namespaces here: {reason}; run as root with iproute2")
    # The process number tells runs at the same time apart.
    made = Chain(names=tuple(f"bapipe-{os.getpid()}-{rank}" for rank in range(ranks)))
    try:
        for name in made.names:
            _call(["ip", "netns", "add", name])
            _call(["ip", "-n", name, "link", "set", "lo", "up"])
            _call(["ip", "netns", "exec", name, "sysctl", "-qw", "net.ipv4.ip_forward=1"])
        _connect(made)
        yield made
    finally:
        for name in made.names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def _connect(made: Chain) -> None:
    names = made.names
    for rank in range(len(names) - 1):
        ends = ["next", "mtu", str(_MTU), "netns", names[rank]]
        peer = ["peer", "name", "prev", "mtu", str(_MTU), "netns", names[rank + 1]]
        _call(["ip", "link", "add", *ends, "type", "veth", *peer])
    for name, interface in made._ends():
        _call(["ip", "-n", name, "link", "set", interface, "up"])
    for rank, name in enumerate(names):
        _call(["ip", "-n", name, "address", "add", f"{_address(rank)}/32", "dev", made.interface(rank)])
        for other in range(len(names)):
            if abs(other - rank) == 1:
                way = ["dev", "next" if other > rank else "prev"]
            elif other != rank:
                nearer = rank + 1 if other > rank else rank - 1
                way = ["via", _address(nearer), "dev", "next" if other > rank else "prev", "onlink"]
            else:
                continue
            _call(["ip", "-n", name, "route", "add", f"{_address(other)}/32", *way, "src", _address(rank)])


def _address(rank: int) -> str:
    return f"10.77.0.{rank + 1}"


def _call(command: Sequence[str]) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise BaPipeError(f"'{' '.join(command)}' failed: {said[:200]}")
