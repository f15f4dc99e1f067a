"""Every transport keeps the same promises: order, content, bounded memory, and an error where a peer is gone."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="transports need torch: pip install bapipe[torch]")

from transport_worker import MIXED, WORLD, content, serve  # noqa: E402

from bapipe.errors import BaPipeError  # noqa: E402
from bapipe.schedule.channel_window import AHEAD, WINDOW  # noqa: E402
from bapipe.torch.comm.choose_transport import candidates, make_transport  # noqa: E402
from bapipe.torch.comm.ipc import SLOTS  # noqa: E402
from bapipe.torch.comm.packing import message_of, packed_size, unpacked  # noqa: E402
from bapipe.torch.comm.rank_topology import Place  # noqa: E402

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
NEEDS_GPU = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 1, reason="needs a CUDA device, and torch finds none")]
NAMES = [
    pytest.param("gloo"),
    pytest.param("staged", marks=NEEDS_GPU),
    pytest.param("ipc", marks=NEEDS_GPU),
    pytest.param("nccl", marks=NEEDS_GPU),
]
PATIENCE = 120.0
"""seconds after which a case that has not answered hangs"""


class Crew:
    """Processes that stay for many cases."""

    def __init__(self, name: str, folder: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self.name = name
        self.processes = []
        self.connections = []
        for rank in range(WORLD):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, str(folder), rank, name), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.connections.append(ours)
        assert self.answers(range(WORLD)) == ["ready"] * WORLD

    def run(self, case: str, *, timeout: float = 60.0, dies: int | None = None) -> list[dict[str, Any]]:
        """What each rank found; of the rank that dies nothing is expected."""
        for connection in self.connections:
            connection.send((case, timeout))
        found = self.answers([rank for rank in range(WORLD) if rank != dies])
        failed = [said["failed"] for said in found if "failed" in said]
        assert not failed, "\n".join(failed)
        return found

    def answers(self, ranks: Any) -> list[Any]:
        end = time.monotonic() + PATIENCE
        answers = []
        for rank in ranks:
            left = max(0.0, end - time.monotonic())
            assert self.connections[rank].poll(left), f"rank {rank} has not answered in {PATIENCE:g} s"
            answers.append(self.connections[rank].recv())
        return answers

    def leave(self, ranks: Any) -> list[int | None]:
        """Exit codes of ranks that are told to end."""
        for rank in ranks:
            self.connections[rank].send(None)
        for rank in ranks:
            self.processes[rank].join(PATIENCE)
        return [self.processes[rank].exitcode for rank in ranks]

    def end(self) -> None:
        for process, connection in zip(self.processes, self.connections, strict=True):
            process.kill()
            process.join()
            connection.close()


@pytest.fixture(scope="module", params=NAMES)
def crew(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crew]:
    crew = Crew(request.param, tmp_path_factory.mktemp(request.param))
    yield crew
    crew.end()


def clean(found: list[dict[str, Any]]) -> None:
    """A closed transport leaves neither threads nor memory on the GPU."""
    assert [said["threads"] for said in found] == [[]] * len(found)
    assert [said["left"] for said in found] == [0] * len(found)


@pytest.mark.parametrize("case", ["relayed", "growing"])
def test_messages_arrive_whole_and_in_order(crew: Crew, case: str) -> None:
    clean(crew.run(case))


def test_both_directions_at_once_in_bounded_memory(crew: Crew) -> None:
    """Of 30 messages per channel the second rank, with two channels each way, holds those under way: per channel
    in AHEAD and the one taken, per channel out WINDOW and one, one being made, and ipc's buffers."""
    found = crew.run("both_ways")
    clean(found)
    assert [said["in"] for said in found] == [AHEAD + 1] * WORLD
    assert all(1 <= said["out"] <= WINDOW + 1 for said in found)
    assert all(said["messages"] <= 2 * (AHEAD + 1 + WINDOW + 1 + 1 + SLOTS) for said in found)


def test_an_answer_frees_what_it_answers(crew: Crew) -> None:
    first, second, third = crew.run("answered")
    clean([first, second, third])
    assert first["out"] == [5]
    assert second["out"][0] <= WINDOW + 1
    assert all(said["idle"] for said in (first, second, third))


def test_memory_is_not_reused_while_it_is_needed(crew: Crew) -> None:
    found = crew.run("reused")
    clean(found)
    assert found[1]["good"] == [True] * 24


def test_a_wire_that_waits_holds_up_no_other(crew: Crew) -> None:
    found = crew.run("head_of_line")
    clean(found)
    assert found[1]["got"] == [2, 1, 3, 4]


def test_a_peer_that_is_late_is_named(crew: Crew) -> None:
    _, second, _ = crew.run("late", timeout=3.0)
    assert [said["peer"] for said in second["found"]] == [0, 0, 2]
    assert all(said["late"] for said in second["found"])
    assert second["found"][0]["text"] == "rank 0 did not answer in time"
    assert second["threads"] == []


@pytest.mark.parametrize("name", NAMES)
def test_a_peer_that_dies_is_named_by_every_waiter(name: str, tmp_path: Path) -> None:
    """Long before the timeout, except that NCCL may not notice; and the ranks that are left can end."""
    crew = Crew(name, tmp_path)
    try:
        found = crew.run("killed", timeout=10 if name == "nccl" else 60, dies=2)
        assert [said["peer"] for said in found[1]["found"]] == [2] * 5
        assert name == "nccl" or not any(said["late"] for said in found[1]["found"])
        assert [said["threads"] for said in found] == [[], []]
        assert crew.leave([0, 1]) == [0, 0]
    finally:
        crew.end()


def test_a_message_is_packed_and_unpacked() -> None:
    values = content(MIXED, 1, torch.device("cpu"))
    assert message_of(values) == MIXED
    buffer = torch.zeros(packed_size(MIXED), dtype=torch.uint8)
    for view, value in zip(unpacked(buffer, MIXED), values, strict=True):
        view.copy_(value)
    for view, value in zip(unpacked(buffer, MIXED), values, strict=True):
        assert (view.dtype, view.shape) == (value.dtype, value.shape)
        assert torch.equal(view, value)
    assert packed_size(()) > 0


ONE = Place(host="a", device="cuda", gpu="1")
CPU = Place(host="a", device="cpu")


@pytest.mark.parametrize(
    "places, expected",
    [
        ([CPU, replace(CPU, host="b")], ("gloo",)),
        ([ONE, replace(ONE, gpu="2")], ("nccl", "ipc", "staged")),
        ([ONE, replace(ONE, host="b")], ("nccl", "staged")),
        ([ONE, ONE], ("ipc", "staged")),
        ([replace(ONE, nccl_host="1"), replace(ONE, nccl_host="2")], ("nccl", "ipc", "staged")),
        ([ONE, ONE, replace(ONE, host="b")], ("staged",)),
    ],
)
def test_places_decide_what_can_be_used(places: list[Place], expected: tuple[str, ...]) -> None:
    assert candidates(places, nccl=True) == expected
    assert candidates(places, nccl=False) == tuple(name for name in expected if name != "nccl")


def test_devices_of_two_types_are_refused() -> None:
    with pytest.raises(BaPipeError, match=r"same type of device, got cuda on rank 0 and cpu on rank 2; run all"):
        candidates([ONE, ONE, CPU], nccl=True)


@pytest.mark.usefixtures("alone")
def test_on_a_cpu_it_is_gloo() -> None:
    for name in ("auto", "gloo"):
        assert make_transport(name, device=torch.device("cpu")).name == "gloo"


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    "name, message",
    [
        ("glo", r"a transport is one of auto, gloo, .*, got 'glo' \(did you mean 'gloo'\?\)"),
        ("ipc", "the ipc transport moves CUDA tensors, and the ranks are on CPUs; use gloo, or auto"),
    ],
)
def test_a_transport_that_cannot_serve_is_refused(name: str, message: str) -> None:
    with pytest.raises(BaPipeError, match=message):
        make_transport(name, device=torch.device("cpu"))


def test_the_private_parts_of_torch_are_where_they_were() -> None:
    """Those of bapipe.torch.comm.ipc_handles."""
    assert callable(torch.UntypedStorage._share_cuda_)
    assert callable(torch.UntypedStorage._new_shared_cuda)
