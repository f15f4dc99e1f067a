"""Another user of the same machine, who knows the ports, the folder and the processes of a local run."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="running a plan needs torch: pip install bapipe[torch]")

from elastic_runs import COMMAND, ENVIRONMENT, ranks_of
from run_plans import ROOT, make_plan

from bapipe.io.run_folder import RUN_FOLDER, RUN_ID, prepare_folder
from bapipe.models.layers import ModelRef
from bapipe.records.plan import write_plan

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="who listens where is read from /proc")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")

HERE = Path(__file__).resolve().parent
NOBODY = 65534
FAR_TOO_LONG = 240
LISTEN = "0A"


def _ports(processes: list[int]) -> dict[int, str]:
    """Port -> the address at which these processes listen, as the kernel writes it."""
    sockets = set()
    for process in processes:
        for entry in Path(f"/proc/{process}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed since the folder was listed
                found = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(entry))
                sockets |= {found[1]} if found else set()
    listening = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, _, _, _, _, _, number, *_ = line.split()
            if state == LISTEN and number in sockets:
                address, _, port = local.rpartition(":")
                listening[int(port, 16)] = address
    return listening


def _until(happened: Callable[[], object], process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + FAR_TOO_LONG
    while not happened():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.02)


@needs_root
def test_another_user_cannot_reach_a_local_run(tmp_path: Path) -> None:
    """It tries every port, file and process of a run that waits for it, which then ends with the losses of one
    process."""
    model = ModelRef(name="waiting", ref="waiting_model:build", args={"note": str(tmp_path / "go")})
    plan = make_plan("1f1b-so", model=model, layers=("0", "1", "2"), dtype="fp64", microbatch_size=2)
    write_plan(plan, tmp_path / "plan.json")
    environment = {**ENVIRONMENT, "PYTHONPATH": f"{ENVIRONMENT['PYTHONPATH']}{os.pathsep}{HERE}"}
    # Set for runs on several nodes, say: a local run needs no network.
    environment["GLOO_SOCKET_IFNAME"] = "eth0"
    command = [*COMMAND, str(tmp_path / "plan.json"), "--steps", "20", "--check", "--timeout", str(FAR_TOO_LONG)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, env=environment, text=True, **pipes) as process:  # type: ignore[call-overload]
        try:
            _until((tmp_path / "go-waits").exists, process)
            ranks = ranks_of(process.pid)
            ports = _ports([process.pid, *ranks.values()])
            assert len(ranks) == 2
            assert set(ports.values()) <= {"0100007F", "00000000000000000000000001000000"}, "none but loopback"
            variables = Path(f"/proc/{ranks[0]}/environ").read_bytes().decode().split("\0")
            folder = dict(item.split("=", 1) for item in variables if item)[RUN_FOLDER]
            known = {"ports": sorted(ports), "folder": folder, "processes": [process.pid, *ranks.values()]}
            stranger = [sys.executable, str(HERE / "stranger.py"), str(NOBODY), json.dumps(known)]
            done = subprocess.run(stranger, capture_output=True, text=True, timeout=FAR_TOO_LONG, check=False)
            assert (done.returncode, done.stderr) == (0, "")
            assert json.loads(done.stdout) == []
            (tmp_path / "go").touch()
            output, error = process.communicate(timeout=FAR_TOO_LONG)
        finally:
            process.kill()
    assert (process.returncode, error) == (0, "")
    assert re.search(r"gradients differ from one process .* by at most \S+ \(.*\), losses by \d", output), output


RANK = """
import datetime, os, sys
from pathlib import Path
import torch.distributed as dist
from bapipe.torch.comm.gloo_groups import meet
print("ready", flush=True)
for line in sys.stdin:
    try:
        meet(Path(line.strip()), int(sys.argv[1]), 2, datetime.timedelta(seconds=20))
        print("met", flush=True)
        dist.destroy_process_group()
    except Exception as error:
        print(type(error).__name__, error, flush=True)
        os._exit(0)
"""
STRANGER = f"""
import encodings.idna, os, socket, struct, sys
os.setgroups([])
os.setgid({NOBODY})
os.setuid({NOBODY})
peers = []
print("ready", flush=True)
for line in sys.stdin:
    for number in range(4):
        peer = socket.create_connection(("127.0.0.1", int(line)))
        peer.sendall(struct.pack("<q", number))
        peers.append(peer)
    print("there", flush=True)
"""


class _Helper:
    """A process that does something for every line that it is given, and says so in a line."""

    def __init__(self, code: str, *arguments: str) -> None:
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "TORCH_CPP_LOG_LEVEL": "FATAL"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, *arguments],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def give(self, line: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


@needs_root
def test_who_takes_the_place_of_a_rank_while_ranks_meet_is_found_out(tmp_path: Path) -> None:
    """Rank 0 listens and waits for rank 1, which is late; somebody else connects before it.

    Which of two ranks connects to the other depends on their ports. So it is done until it is rank 1.
    """
    from torch.distributed import FileStore  # type: ignore[attr-defined]

    ranks, stranger = [_Helper(RANK, "0"), _Helper(RANK, "1")], _Helper(STRANGER)
    helpers = [*ranks, stranger]
    said = ["met", "met"]
    try:
        assert [helper.answer() for helper in helpers] == ["ready"] * 3
        for turn in range(30):
            folder = tmp_path / str(turn)
            folder.mkdir(mode=0o700)
            prepare_folder(folder)
            FileStore(str(folder / "store"), 2).add("bapipe/there", 1)  # rank 1 seems to be there
            before = set(_ports([ranks[0].process.pid]))
            ranks[0].give(folder)
            _until(lambda before=before: set(_ports([ranks[0].process.pid])) - before, ranks[0].process)
            stranger.give((set(_ports([ranks[0].process.pid])) - before).pop())
            assert stranger.answer() == "there"
            ranks[1].give(folder)
            said = [rank.answer() for rank in ranks]
            if said != ["met", "met"]:
                break
    finally:
        for helper in helpers:
            helper.process.kill()
            helper.process.communicate()
    found_out = f"IntruderError a process of user {NOBODY} has connected to a port of this run while its ranks met"
    assert said[0].startswith(found_out), said
    assert said[1].startswith("LinkError"), said


def test_looking_for_ports_leaves_no_descriptor_open() -> None:
    """Each look left a copy of every file and pipe open, so that their number grew fourfold with each group."""
    from bapipe.torch.comm.gloo_groups import close_ports, listening

    with socket.create_server(("127.0.0.1", 0)) as server, open(os.devnull, "rb"):
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            assert server.fileno() in listening()
            close_ports([server.fileno()])
        assert len(os.listdir("/proc/self/fd")) == before


def test_ports_take_nobody_once_they_are_closed() -> None:
    from bapipe.torch.comm.gloo_groups import close_ports, listening

    before = listening()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        opened = {number: at for number, at in listening().items() if number not in before}
        assert opened == {server.fileno(): port}
        with socket.create_connection(("127.0.0.1", port)) as client:
            close_ports(opened)
            with pytest.raises(TimeoutError):
                socket.create_connection(("127.0.0.1", port), timeout=0.3)
            accepted, _ = server.accept()
            with accepted:
                client.sendall(struct.pack("<q", 7))
                assert accepted.recv(8) == struct.pack("<q", 7)


def test_a_folder_that_others_can_look_into_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bapipe.errors import BaPipeError
    from bapipe.io.run_folder import found_folder, pair_token

    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    assert found_folder() is None
    for name, value in prepare_folder(folder).items():
        monkeypatch.setenv(name, value)
    assert found_folder() == folder
    assert pair_token(folder, "group", 0, 1) != pair_token(folder, "group", 1, 0)
    folder.chmod(0o750)
    with pytest.raises(BaPipeError, match="is not a folder of this user alone; leave BAPIPE_RUN to bapipe run"):
        found_folder()
    monkeypatch.setenv(RUN_ID, "of a torchrun that a rank has started")
    assert found_folder() is None
