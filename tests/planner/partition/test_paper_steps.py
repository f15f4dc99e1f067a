"""The paper's partition, step by step, on cases worked out by hand."""

from __future__ import annotations

import pytest

from bapipe.costs.segments import make_chain
from bapipe.errors import BaPipeError
from bapipe.planner.partition.paper.balanced import balanced_partition
from bapipe.planner.partition.paper.coarse_grained import coarse_grained, communication_bound
from bapipe.planner.partition.paper.inter_layer import ideal_time, inter_layer
from bapipe.planner.partition.paper.intra_layer import intra_layer
from bapipe.planner.partition.paper.memory_tuning import fit_memory
from bapipe.planner.partition.paper.stage_cuts import prefix_work, stage_times
from made_profiles import made_profile


def chain_of(work, *, types=None, **more):
    times = {"x": work} if types is None else types
    return make_chain(made_profile(times, **more), list(times), 1)


def test_equation_one_splits_in_proportion_to_speed() -> None:
    assert ideal_time([4.0, 4.0]) == 2.0
    assert ideal_time([3.0, 6.0]) == pytest.approx(2.0)


def test_inter_layer_balances_equal_layers() -> None:
    chain = chain_of([1.0] * 8)
    assert inter_layer(chain, [0, 0, 0, 0]) == (1, 3, 5, 7)


def test_inter_layer_gives_a_fast_accelerator_more_layers() -> None:
    chain = chain_of(None, types={"fast": [1.0] * 9, "slow": [2.0] * 9})
    cuts = inter_layer(chain, [0, 1])
    assert cuts == (5, 8)
    assert stage_times(prefix_work(chain), [0, 1], cuts) == pytest.approx([6.0, 6.0])


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(BaPipeError, match=r"3 stages need at least 2 places to cut, got 1; lower --stages"):
        inter_layer(chain_of([1.0, 1.0]), [0, 0, 0])


def test_coarse_grained_cuts_only_where_little_crosses() -> None:
    # Balanced is after layer 1 or 2, but only the cut after layer 0 is sent within a stage's time.
    chain = chain_of([2.0, 2.0, 2.0, 2.0], boundary=[1.0, 100.0, 100.0, 0.0])

    def transfer(cut: int) -> float:
        return float(chain.boundary_forward[cut])

    start = inter_layer(chain, [0, 0])
    assert start == (1, 3)
    assert communication_bound(chain, [0, 0], start, transfer)
    cuts, limit, groups = coarse_grained(chain, [0, 0], transfer, start)
    assert cuts == (0, 3)
    assert limit >= 4.0
    assert groups == 2


def test_the_threshold_grows_with_the_stages_it_makes() -> None:
    # At T = 4 no cut is sent in time; the least loaded cut (5 s) is then taken.
    chain = chain_of([2.0, 2.0, 2.0, 2.0], boundary=[9.0, 50.0, 5.0, 0.0])
    cuts, _, _ = coarse_grained(chain, [0, 0], lambda cut: float(chain.boundary_forward[cut]), (1, 3))
    assert cuts == (2, 3)


def test_intra_layer_moves_channels_between_neighbours() -> None:
    # Layers of 1, 2, 1: cut whole the stages take 3 and 1 (or 1 and 3); split in the middle 2 and 2.
    chain = chain_of([1.0, 2.0, 1.0], split={1: 16})
    cuts = inter_layer(chain, [0, 0])
    finer, split_cuts = intra_layer(chain, [0, 0], cuts, lambda _: lambda _: 0.0)
    assert stage_times(prefix_work(finer), [0, 0], split_cuts) == pytest.approx([2.0, 2.0])
    unit = finer.units[split_cuts[0]]
    assert (unit.layer, unit.stop, unit.of) == (1, 8, 16)


def test_a_cut_inside_a_layer_sends_its_input_and_the_finished_outputs() -> None:
    profile = made_profile({"x": [1.0, 2.0, 1.0]}, boundary=[10.0, 40.0, 0.0], split={1: 4})
    chain = make_chain(profile, ["x"], 1, split={1: 4})
    assert [float(value) for value in chain.boundary_forward] == [10.0, 20.0, 30.0, 40.0, 40.0, 0.0]
    assert float(chain.resident_input[2]) == 10.0


def test_intra_layer_keeps_layers_that_may_not_be_split() -> None:
    chain = chain_of([1.0, 2.0, 1.0])
    cuts = inter_layer(chain, [0, 0])
    assert intra_layer(chain, [0, 0], cuts, lambda _: lambda _: 0.0) == (chain, cuts)


def test_memory_fine_tuning_moves_layers_out_of_a_full_stage() -> None:
    sizes = [5.0, 1.0, 1.0, 1.0]

    def memory(cuts):
        firsts = [0, *(cut + 1 for cut in cuts[:-1])]
        return [sum(sizes[first : last + 1]) for first, last in zip(firsts, cuts, strict=True)]

    cuts, short = fit_memory((1, 3), memory, [5.0, 5.0], lambda _: [1.0, 1.0])
    assert (cuts, short) == ((0, 3), 0.0)
    cuts, short = fit_memory((1, 3), memory, [4.0, 5.0], lambda _: [1.0, 1.0])
    assert short == 1.0


def test_the_steps_are_recorded_with_what_they_saw_and_changed() -> None:
    chain = chain_of([2.0, 2.0, 2.0, 2.0], boundary=[1.0, 100.0, 100.0, 0.0])
    found = balanced_partition(
        chain,
        [0, 0],
        transfer_of=lambda own: lambda cut: float(own.boundary_forward[cut]),
        memory_of=lambda _: lambda cuts: [0.0 for _ in cuts],
        capacity=[1.0, 1.0],
    )
    ran = {step.name: step.ran for step in found.steps}
    assert ran == {
        "inter-layer": True,
        "communication test": True,
        "coarse-grained": True,
        "intra-layer": False,
        "memory fine-tuning": False,
    }
    assert "cuts after layers 1 -> 0" in found.steps[2].change
    assert "4 s" in found.steps[0].numbers
