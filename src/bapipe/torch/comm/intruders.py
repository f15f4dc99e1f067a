"""Who is connected to the ports of this process. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Container
from pathlib import Path

from bapipe.errors import BaPipeError

__all__ = ["IntruderError", "foreign_peers"]

_ESTABLISHED = "01"


class IntruderError(BaPipeError):
    """Something that is no rank of the run is connected to one."""

    def __init__(self, who: str) -> None:
        super().__init__(
            f"{who} has connected to a port of this run while its ranks met; end it, or run where other users "
            "cannot start processes"
        )


def foreign_peers(ports: Container[int]) -> list[int]:
    """Users, other than this process's own, who hold a connection to one of these ports of this machine.

    From the system's tables, which name the owner of every socket; empty where it has none.
    """
    users = {user for _, remote, user in _connections() if remote in ports}
    return sorted(users - {os.geteuid()})


def _connections() -> list[tuple[int, int, int]]:
    """(local port, remote port, user) of every established connection of the machine."""
    found = []
    for table in ("tcp", "tcp6"):
        try:
            lines = Path(f"/proc/self/net/{table}").read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            _, local, remote, state, _, _, _, user, *_ = line.split()
            if state == _ESTABLISHED:
                found.append((_port(local), _port(remote), int(user)))
    return found


def _port(address: str) -> int:
    return int(address.rpartition(":")[2], 16)
