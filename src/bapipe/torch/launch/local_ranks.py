"""Starts ranks on this machine, which meet in a folder of their user's alone and open no port for others.

    python -m bapipe.torch.launch.local_ranks PARENT RANKS PROGRAM …

starts RANKS processes of `python PROGRAM …` and ends with PARENT, the process that started it. Imports no torch.
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from bapipe.io.run_folder import prepare_folder
from bapipe.torch.health.parent_death import end_with_parent, write_parent
from bapipe.torch.launch.abandoned_folders import folder_prefix, remove_abandoned
from bapipe.torch.launch.supervise import Ended, supervise

__all__ = ["main", "run_local", "shared_folder"]

_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""the only network that ranks of one machine need"""


@contextmanager
def shared_folder() -> Iterator[Path]:
    """A folder for the ranks of a run, which goes with it; nobody else can look into it.

    Those of launchers that were killed are removed.
    """
    remove_abandoned()
    with tempfile.TemporaryDirectory(prefix=folder_prefix(), ignore_cleanup_errors=True) as name:
        yield Path(name)


def run_local(
    ranks: int,
    program: Sequence[str],
    folder: Path,
    environment: Mapping[str, str],
    *,
    labelled: bool = True,
    patience: float | None = None,
) -> Ended:
    """Run `python PROGRAM …` once for every rank, to the end; see `supervise`.

    Ranks get the variables that torchrun sets. A script that makes a process group of its own from them has
    torch's store at a port, which is open to all; `bapipe.torch.runtime.process_group` meets in the folder
    instead.
    """
    write_parent(os.getpid(), folder)
    shared = {
        **environment,
        **(_LOOPBACK if sys.platform == "linux" else {}),
        **prepare_folder(folder),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": "default",
        "ROLE_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }
    command = [sys.executable, "-u", *program]
    own = [
        {**shared, **{name: str(rank) for name in ("RANK", "LOCAL_RANK", "ROLE_RANK")}} for rank in range(ranks)
    ]
    return supervise([(command, variables) for variables in own], labelled=labelled, patience=patience)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def main(argv: Sequence[str]) -> int:
    """Run a program on several ranks; 0, or 1 where one failed."""
    parent, ranks, *program = argv
    end_with_parent(int(parent))
    with shared_folder() as folder:
        ended = run_local(int(ranks), program, folder, os.environ)
    return 1 if ended.failed or ended.stopped_by is not None else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
