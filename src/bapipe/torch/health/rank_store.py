"""Notes that ranks leave for each other, in the store at which they met."""

from __future__ import annotations

import datetime
import os
import socket
from typing import Any

import torch.distributed as dist

__all__ = ["RankStore"]

_PATIENCE = 10.0
"""seconds that one look at the store may take"""


class RankStore:
    """One connection to the store; a thread that must not wait for another has its own.

    Every call raises RuntimeError once the store's host is gone.
    """

    def __init__(self, store: Any) -> None:
        self._store = store

    @classmethod
    def connect(cls) -> RankStore | None:
        """The store at MASTER_ADDR and MASTER_PORT: torchrun's, which outlives ranks, or rank 0's.

        None where there is none, as in a group that met by a file.
        """
        host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
        if not host or not port.isdigit() or dist.get_world_size() < 2:
            return None
        try:
            # Asked first, because torch's own client logs a page where nobody listens.
            socket.create_connection((host, int(port)), timeout=5.0).close()
            store = dist.TCPStore(  # type: ignore[attr-defined]
                host,
                int(port),
                is_master=False,
                timeout=datetime.timedelta(seconds=_PATIENCE),
                wait_for_workers=False,
            )
        except (OSError, RuntimeError):
            return None
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return cls(dist.PrefixStore(f"bapipe/watch/{attempt}", store))  # type: ignore[attr-defined]

    def write(self, key: str, text: str) -> None:
        self._store.set(key, text)

    def read(self, key: str) -> str | None:
        """None if nobody has written it."""
        if not self._store.check([key]):
            return None
        return bytes(self._store.get(key)).decode(errors="replace")

    def first(self, key: str, text: str) -> str:
        """Write it unless it is written already; what stands there then."""
        return bytes(self._store.compare_set(key, "", text)).decode(errors="replace")
