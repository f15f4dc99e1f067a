"""The folder that the ranks of a local run share with their launcher, and with no other user. Imports no torch.

It has the store at which ranks meet, a key by which they know each other, the notes that they leave for each other
and for the launcher, and what each is at. A name in a rank's environment says where it is.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
from pathlib import Path

from bapipe.errors import BaPipeError

__all__ = ["RUN_FOLDER", "RUN_ID", "found_folder", "pair_token", "prepare_folder", "store_file"]

RUN_FOLDER = "BAPIPE_RUN"
"""names the folder in a rank's environment"""
RUN_ID = "TORCHELASTIC_RUN_ID"
"""the run of a rank, as torchrun names it: a torchrun that a rank starts gives its own ranks another"""
_KEY = "key"
_KEY_BYTES = 32


def prepare_folder(folder: Path) -> dict[str, str]:
    """Make the key in a new folder of mode 0700; what ranks need in their environment to find the folder."""
    handle = os.open(folder / _KEY, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(handle, "wb") as file:
        file.write(secrets.token_bytes(_KEY_BYTES))
    return {RUN_FOLDER: str(folder), RUN_ID: folder.name}


def found_folder() -> Path | None:
    """The folder of the run that this process is a rank of; None where no launcher of BaPipe has started it.

    Raises a BaPipeError where others could write to it.
    """
    name = os.environ.get(RUN_FOLDER)
    if not name or os.environ.get(RUN_ID) != Path(name).name:
        return None
    folder = Path(name)
    try:
        about = folder.lstat()
    except OSError:
        raise BaPipeError(
            f"the folder of this run, {name}, is gone: its launcher has ended; start it again"
        ) from None
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid() or stat.S_IMODE(about.st_mode) & 0o077:
        raise BaPipeError(f"{name} is not a folder of this user alone; leave {RUN_FOLDER} to bapipe run")
    return folder


def store_file(folder: Path) -> Path:
    """The file of the store at which ranks meet."""
    return folder / "store"


def pair_token(folder: Path, group: str, sender: int, receiver: int) -> bytes:
    """What one rank shows another in a process group, which only those who can read the folder know; 32 bytes."""
    key = (folder / _KEY).read_bytes()
    return hmac.new(key, f"{group} {sender} {receiver}".encode(), hashlib.sha256).digest()
