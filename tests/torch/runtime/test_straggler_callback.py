"""`Pipeline(on_straggler=…)`: called where this rank computes much longer than it did."""

from __future__ import annotations

import logging
import time
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="pipelines need torch: pip install bapipe[torch]")

from torch import nn  # noqa: E402

from bapipe.torch import Pipeline  # noqa: E402
from bapipe.torch.health.stragglers import WINDOW, Straggler  # noqa: E402
from one_rank_plan import build, one_rank  # noqa: E402

USUAL, SLOW = 0.002, 0.03


pytestmark = pytest.mark.usefixtures("alone")


def trained(**options: Any) -> None:
    """A rank that takes 2 ms an action, and 30 ms from the second window on."""
    plan = one_rank()
    seconds = USUAL

    pipe = Pipeline(build, plan, nn.functional.mse_loss, **options)
    forwards = [runner.forward for runner in pipe.engine.runners.values()]

    def slowed(*arguments: Any) -> Any:
        time.sleep(seconds)
        return forwards[0](*arguments)

    next(iter(pipe.engine.runners.values())).forward = slowed
    batch = torch.rand(plan.global_batch, 6).double(), torch.rand(plan.global_batch, 4).double()
    for step in range(2 + 2 * WINDOW):
        seconds = USUAL if step < 2 + WINDOW else SLOW
        pipe.step(*batch)
    pipe.close()


def test_the_callback_is_given_the_rank_and_its_cost() -> None:
    found: list[Straggler] = []
    trained(on_straggler=found.append)
    (slow,) = found
    assert (slow.rank, slow.step, slow.against) == (0, 1 + 2 * WINDOW, "past")
    assert slow.factor > 3
    assert slow.lost > slow.throughput


def test_without_a_callback_it_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        trained()
    (line,) = [item.message for item in caplog.records if "slow" in item.message]
    assert line.startswith("rank 0 has become slow: in steps 10 to 17 it computes ")


def test_nothing_is_said_where_nothing_is_recorded() -> None:
    found: list[Straggler] = []
    trained(on_straggler=found.append, trace=False)
    assert found == []
