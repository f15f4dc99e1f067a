"""The costs that a simulation takes: one value for all stages or one each, and what is refused."""

from __future__ import annotations

import math

import pytest

from bapipe.errors import BaPipeError
from bapipe.schedule.generators import make_schedule
from bapipe.simulator.action_costs import Costs
from bapipe.simulator.simulate import simulate


class TestCosts:
    def test_one_value_for_all_or_one_each(self) -> None:
        costs = Costs.of(3, forward=1, backward=[2, 3, 4], transfer=[5, 6])
        assert costs.forward == (1, 1, 1)
        assert costs.backward == (2, 3, 4)
        assert costs.send_forward == costs.send_backward == (5, 6)
        assert (costs.num_stages, costs.transfer, costs.uniform) == (3, 6, False)
        assert Costs.of(3, forward=1, backward=2, transfer=5).uniform
        assert not Costs.of(3, forward=1, backward=2, transfer=5, transfer_backward=4).uniform

    def test_split_deals_round_robin(self) -> None:
        costs = Costs.of(2, forward=(2, 4), backward=(6, 8), transfer=1, transfer_backward=3).split(2)
        assert costs.forward == (1, 2, 1, 2)
        assert costs.backward == (3, 4, 3, 4)
        assert costs.send_forward == (1, 1, 1)
        assert costs.send_backward == (3, 3, 3)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"forward": 0}, "forward time must be a finite number of more than 0, got 0"),
            ({"forward": -1}, "forward time must be a finite number of more than 0, got -1"),
            ({"backward": [1, 0]}, "backward time must be a finite number of more than 0, got 0"),
            ({"forward": math.nan}, "forward time must be a finite number.*got nan"),
            ({"backward": math.inf}, "backward time must be a finite number.*got inf"),
            ({"transfer": -0.5}, "transfer time must be a finite number of at least 0, got -0.5"),
            ({"forward": [1, 2, 3]}, "forward time: 2 stages need one value or 2, got 3"),
            ({"transfer": [1, 2]}, "transfer time: 1 link need one value or 1, got 2"),
            ({"weight_gradient": 5}, "the weight gradient takes 5 of a backward of 2; lower it"),
            ({"all_reduce": -1}, "all-reduce time must be"),
            ({"update": math.nan}, "update time must be"),
            ({"forward": 1e200}, "between 1e-100 and 1e100, got 1e\\+200; choose another unit"),
            ({"forward": 1e-200}, "between 1e-100 and 1e100"),
        ],
    )
    def test_mistakes(self, arguments: dict[str, object], message: str) -> None:
        with pytest.raises(BaPipeError, match=message):
            Costs.of(2, **{"forward": 1, "backward": 2, **arguments})  # type: ignore[arg-type]

    def test_other_number_of_stages(self) -> None:
        with pytest.raises(BaPipeError, match="the schedule has 2 stages but the costs are of 3"):
            simulate(make_schedule("gpipe", 2, 2), Costs.of(3, forward=1, backward=1))
