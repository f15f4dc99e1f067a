"""Notes that ranks leave for each other: in the folder of a local run, or in the store at which they met."""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
import tempfile
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist

from bapipe.io.run_folder import found_folder

__all__ = ["FolderStore", "RankStore", "SharedStore", "connect_store"]

_PATIENCE = 10.0
"""seconds that one look at the store may take"""


class RankStore(Protocol):
    """Texts by key. Every call raises RuntimeError once the store is gone."""

    def write(self, key: str, text: str) -> None: ...

    def read(self, key: str) -> str | None:
        """None if nobody has written it."""

    def first(self, key: str, text: str) -> str:
        """Write it unless it is written already; what stands there then."""


def connect_store() -> RankStore | None:
    """A connection to the store of this run, for one thread; None where there is none, or only one rank."""
    if dist.get_world_size() < 2:
        return None
    folder = found_folder()
    return SharedStore.connect() if folder is None else FolderStore(folder / "notes")


class FolderStore:
    """A file per key, in a folder that only this user can look into; each is replaced as a whole."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with _gone():
            folder.mkdir(mode=0o700, exist_ok=True)

    def _path(self, key: str) -> Path:
        return self._folder / key.replace("/", "-")

    def _made(self, text: str) -> Path:
        handle, name = tempfile.mkstemp(dir=self._folder, prefix=".")
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
        return Path(name)

    def write(self, key: str, text: str) -> None:
        with _gone():
            self._made(text).replace(self._path(key))

    def read(self, key: str) -> str | None:
        with _gone():
            try:
                return self._path(key).read_text(encoding="utf-8", errors="replace")
            except FileNotFoundError:
                if self._folder.is_dir():
                    return None
                raise
        return None

    def first(self, key: str, text: str) -> str:
        with _gone():
            made = self._made(text)
            try:
                with contextlib.suppress(FileExistsError):
                    os.link(made, self._path(key))
            finally:
                made.unlink()
        return self.read(key) or text


@contextlib.contextmanager
def _gone() -> Any:
    try:
        yield
    except OSError as error:
        raise RuntimeError(f"the notes of the run cannot be reached: {error}") from error


class SharedStore:
    """One connection to torch's store; a thread that must not wait for another has its own.

    Whoever reaches its port can write to it, so nothing that it says is believed unseen: see `RankNotes`.
    """

    def __init__(self, store: Any) -> None:
        self._store = store

    @classmethod
    def connect(cls) -> SharedStore | None:
        """The store at MASTER_ADDR and MASTER_PORT: torchrun's, which outlives ranks, or rank 0's.

        None where there is none, as in a group that met by a file.
        """
        host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
        if not host or not port.isdigit():
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
        if not self._store.check([key]):
            return None
        return bytes(self._store.get(key)).decode(errors="replace")

    def first(self, key: str, text: str) -> str:
        return bytes(self._store.compare_set(key, "", text)).decode(errors="replace")
