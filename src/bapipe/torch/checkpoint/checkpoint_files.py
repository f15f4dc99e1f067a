"""Files of a checkpoint: hashed while they are written, verified before they are used. Imports no torch."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import os
import stat
import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bapipe.errors import first_line

__all__ = ["HashedFile", "HashingStream", "disk_words", "file_size", "read_small_file", "write_hashed"]

_SMALL = 256 * 2**10
"""bytes up to which writes are collected to be hashed"""
_BLOCK = 4 * 2**20
_MOST_COPIED = 128 * 2**20
"""bytes that were written and still wait to be hashed"""
_READ = 2**30
"""the system reads at most 2 GiB at once"""


class _Hasher:
    """SHA-256 of what is fed to it, made by a thread of its own, in order.

    hashlib and the system's write both leave the interpreter to others, so a file is hashed while it is written.
    What is lent is the caller's memory; what the thread has not got to when the caller wants it back is copied.
    """

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._waiting: deque[memoryview] = deque()
        """copies, and behind them what is lent"""
        self._copied = self._lent = 0
        """bytes of either that wait"""
        self._reading = self._ended = False
        """whether something lent is being hashed; whether nothing more comes"""
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="bapipe checkpoint hash", daemon=True)
        self._thread.start()

    def feed(self, data: bytes) -> None:
        with self._changed:
            assert not self._lent
            self._add_copy(memoryview(data))
            self._changed.notify_all()

    def lend(self, data: memoryview) -> None:
        """Until `take_back` the memory stays as it is."""
        with self._changed:
            self._waiting.extend(data[start : start + _BLOCK] for start in range(0, len(data), _BLOCK))
            self._lent += len(data)
            self._changed.notify_all()

    def take_back(self) -> None:
        with self._changed:
            # Copies are bounded: beyond, the caller waits for the hash.
            while self._lent and self._copied + self._lent > _MOST_COPIED:
                self._changed.wait()
            lent = []
            while self._lent:
                lent.append(self._waiting.pop())
                self._lent -= len(lent[-1])
            for block in reversed(lent):
                self._add_copy(memoryview(bytes(block)))
                block.release()
            while self._reading:
                self._changed.wait()

    def _add_copy(self, block: memoryview) -> None:
        self._waiting.append(block)
        self._copied += len(block)

    def finish(self) -> str:
        """The digest of all that was fed or lent."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        self._thread.join()
        return self._hash.hexdigest()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._ended:
                    self._changed.wait()
                if not self._waiting:
                    return
                block = self._waiting.popleft()
                if self._copied:
                    self._copied -= len(block)
                else:
                    self._lent -= len(block)
                    self._reading = True
            self._hash.update(block)
            block.release()
            with self._changed:
                self._reading = False
                self._changed.notify_all()


class HashingStream(io.RawIOBase):
    """A new file that is hashed while it is written: one pass over the bytes."""

    def __init__(self, path: str | os.PathLike[str], finished: Callable[[str, int, str], None]) -> None:
        """`finished` is called at the close with the file's name, its bytes and their SHA-256."""
        super().__init__()
        self._name = os.path.basename(path)
        self._finished = finished
        self._size = 0
        self._stream = io.BufferedWriter(io.FileIO(path, "x"), buffer_size=2**20)
        self._few = bytearray()
        """written, and not yet given to be hashed"""
        self._hasher = _Hasher()

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        with memoryview(data) as view, view.cast("B") as flat:
            self._size += len(flat)
            if len(flat) < _SMALL:
                self._few += flat
                if len(self._few) >= _SMALL:
                    self._feed_few()
                self._stream.write(flat)
                return len(flat)
            self._feed_few()
            self._hasher.lend(flat)
            try:
                self._stream.write(flat)
            finally:
                self._hasher.take_back()
            return len(flat)

    def _feed_few(self) -> None:
        if self._few:
            self._hasher.feed(bytes(self._few))
            self._few.clear()

    def tell(self) -> int:
        return self._size

    def flush(self) -> None:
        if not self._stream.closed:
            self._stream.flush()

    def fileno(self) -> int:
        """To sync the file by, so all that was written goes to the system first."""
        self._stream.flush()
        return self._stream.fileno()

    def close(self) -> None:
        if self.closed:
            return
        try:
            self._stream.close()
        finally:
            self._feed_few()
            digest = self._hasher.finish()
            super().close()
        self._finished(self._name, self._size, digest)


def write_hashed(path: Path, data: bytes | memoryview) -> tuple[int, str]:
    """A new file, on disk when this returns; its size and SHA-256."""
    written: list[tuple[int, str]] = []
    with HashingStream(path, lambda _, size, sha256: written.append((size, sha256))) as stream:
        stream.write(data)
        os.fsync(stream.fileno())
    return written[0]


def _open(path: Path) -> int:
    """A handle to read a regular file; OSError for anything else, without waiting for a pipe's other end."""
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    try:
        mode = os.fstat(handle).st_mode
        if not stat.S_ISREG(mode):
            raise OSError(errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL, "is no regular file")
    except BaseException:
        os.close(handle)
        raise
    return handle


def file_size(path: Path) -> int:
    """Bytes of a regular file; OSError for anything else."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "is no regular file")
    return found.st_size


def read_small_file(path: Path, limit: int) -> bytes:
    """All bytes of a regular file; OSError if it has more than the limit."""
    handle = _open(path)
    with open(handle, "rb") as stream:
        found = stream.read(limit + 1)
    if len(found) > limit:
        raise OSError(errno.EFBIG, f"has more than {limit} bytes")
    return found


class HashedFile:
    """A file of known size and SHA-256, read only after it was found to have them.

    It is hashed once, and again only if another file has taken its place since. Raises OSError where the disk does
    not let it be read, and ValueError, with words, where it is another file.
    """

    def __init__(self, path: Path, *, size: int, sha256: str | None) -> None:
        self._path, self._size, self._sha256 = path, size, sha256
        self._known: tuple[int, ...] | None = None
        with self._verified():
            pass

    @contextlib.contextmanager
    def _verified(self) -> Iterator[int]:
        """A handle of the file that was verified."""
        with open(_open(self._path), "rb", buffering=0) as stream:
            about = os.fstat(stream.fileno())
            known = (about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns)
            if known != self._known:
                self._verify(stream, about.st_size)
                self._known = known
            yield stream.fileno()

    def _verify(self, stream: io.FileIO, found: int) -> None:
        if found != self._size:
            raise ValueError(f"has {found} bytes instead of {self._size}")
        if self._sha256 is None:
            return
        digest, buffer = hashlib.sha256(), memoryview(bytearray(min(_BLOCK, max(found, 1))))
        while count := stream.readinto(buffer):
            digest.update(buffer[:count])
        if digest.hexdigest() != self._sha256:
            raise ValueError("does not match its checksum")

    def read(self, offset: int, length: int) -> bytes:
        """Exactly these bytes."""
        parts = []
        with self._verified() as handle:
            while length > 0:
                part = os.pread(handle, min(length, _READ), offset)
                if not part:
                    raise OSError(errno.EIO, "ends early")
                parts.append(part)
                offset, length = offset + len(part), length - len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)


def disk_words(error: BaseException) -> str:
    """An error of reading or writing in a few words."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return first_line(error)
