"""ZeRO-1: replicas that share the optimizer step train as replicas that do not, and go on from any checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="running a plan needs torch: pip install bapipe[torch]")

from forked_ranks import read_results, start  # noqa: E402
from sharding_worker import EQUAL, HYBRIDS, RESUMED, STRAIGHT, WORKS, Work  # noqa: E402

HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharding")
    start(HERE / "sharding_worker.py", folder, seconds=600)
    return folder


@pytest.fixture(scope="module")
def results(trained: Path) -> dict[str, list[dict[str, Any]]]:
    found = read_results(trained, [work.world for work in WORKS])
    for ranks in found:
        for rank in ranks:
            assert "error" not in rank, rank["error"]
    return dict(zip([work.name for work in WORKS], found, strict=True))


def weights(folder: Path, work: Work) -> dict[str, Any]:
    """Of the whole model; replicas must have the same."""
    found: dict[str, Any] = {}
    for rank in range(work.world):
        for name, value in torch.load(folder / f"{work.name}-{rank}.pt").items():
            if name in found:
                assert torch.equal(found[name], value), (work.name, name)
            found[name] = value
    return found


@pytest.mark.parametrize(("plain", "sharded"), EQUAL, ids=lambda work: work.name)
def test_bit_for_bit_as_plain_data_parallelism(
    trained: Path, results: Mapping[str, list[dict[str, Any]]], plain: Work, sharded: Work
) -> None:
    one, other = weights(trained, plain), weights(trained, sharded)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert results[plain.name][0]["losses"] == results[sharded.name][0]["losses"]
    assert len(results[plain.name][0]["losses"]) >= 20


@pytest.mark.parametrize(("plain", "sharded"), EQUAL, ids=lambda work: work.name)
def test_each_replica_holds_its_share_of_the_state(
    results: Mapping[str, list[dict[str, Any]]], plain: Work, sharded: Work
) -> None:
    whole, parts = results[plain.name][0], results[sharded.name]
    # The weight that is a single number has its state on one replica, and of one dimension there.
    assert whole["state"] <= sum(part["state"] for part in parts) <= 1.01 * whole["state"]
    assert max(part["state"] for part in parts) < 0.55 * whole["state"]


@pytest.mark.parametrize(("plain", "sharded"), HYBRIDS, ids=lambda work: work.name)
def test_replicated_stages_and_four_replicas(
    trained: Path, results: Mapping[str, list[dict[str, Any]]], plain: Work, sharded: Work
) -> None:
    one, other = weights(trained, plain), weights(trained, sharded)
    for name in one:
        torch.testing.assert_close(other[name], one[name], rtol=1e-9, atol=1e-12)
    for before, after in zip(results[plain.name], results[sharded.name], strict=True):
        assert after["norms"] == pytest.approx(before["norms"], rel=1e-12)
        assert before["gradients"].keys() == after["gradients"].keys()
        for name, value in before["gradients"].items():
            assert (after["gradients"][name] or 0.0) == pytest.approx(value or 0.0, rel=1e-9, abs=1e-12), name
        assert sum(part["state"] for part in results[sharded.name]) < sum(
            part["state"] for part in results[plain.name]
        )


@pytest.mark.parametrize("work", RESUMED, ids=lambda work: work.name)
def test_goes_on_from_a_checkpoint_of_any_number_of_replicas(
    trained: Path, results: Mapping[str, list[dict[str, Any]]], work: Work
) -> None:
    straight, resumed = weights(trained, STRAIGHT), weights(trained, work)
    for name in straight:
        torch.testing.assert_close(resumed[name], straight[name], rtol=1e-9, atol=1e-12)
    ends = [float.fromhex(value) for value in results[STRAIGHT.name][0]["losses"][-3:]]
    assert [float.fromhex(value) for value in results[work.name][0]["losses"]] == pytest.approx(ends, rel=1e-9)
