"""A command on several hosts at once, by ssh, srun or another way, and what each answers."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from bapipe.errors import BaPipeError

__all__ = ["answers_of", "host_command"]

_WAYS = {
    "ssh": ["ssh", "-o", "BatchMode=yes", "{host}"],
    "srun": ["srun", "--nodes=1", "--ntasks=1", "--nodelist={host}"],
}


def host_command(via: str, host: str, command: Sequence[str]) -> list[str]:
    """What to start here so that the command runs on a host.

    `via` is ssh, srun, or words of another command with {host} in them where the host's name goes; like ssh it
    is given the command as one text.
    """
    words = [word.replace("{host}", host) for word in _WAYS.get(via) or shlex.split(via)]
    return [*words, *command] if via == "srun" else [*words, shlex.join(command)]


def answers_of(hosts: Sequence[str], command: Sequence[str], *, via: str, timeout: float) -> Mapping[str, str]:
    """What the command writes on each host. Raises BaPipeError, in a line, for those that fail or stay silent."""
    with ThreadPoolExecutor(len(hosts)) as pool:
        found = list(pool.map(lambda host: _answer(host_command(via, host, command), timeout), hosts))
    wrong = [f"{host} {problem}" for host, (_, problem) in zip(hosts, found, strict=True) if problem]
    if wrong:
        raise BaPipeError(
            f"{'; '.join(wrong)}; try {shlex.join(host_command(via, hosts[0], command))[:200]} by hand, or leave "
            "the host out"
        )
    return {host: text for host, (text, _) in zip(hosts, found, strict=True)}


def _answer(command: Sequence[str], timeout: float) -> tuple[str, str]:
    """What a command writes, and what is wrong with it, if anything."""
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        return "", f"cannot be asked: {command[0]}: {error.strerror}"
    try:
        text, errors = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        # The whole group: what a shell has started would live on, and keep the pipes open.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return "", f"did not answer within {timeout:g} s"
    if process.returncode:
        said = (errors.strip().splitlines() or ["no message"])[-1][:160]
        return "", f"failed with code {process.returncode}: {said}"
    return text, ""
