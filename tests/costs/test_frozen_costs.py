"""Frozen parameters are held once, have no gradients and no optimizer state, and end the way back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bapipe.costs.held_weights import stage_gradients, stage_weights
from bapipe.costs.profile import Profile, read_profile, write_profile
from bapipe.costs.segments import Chain, make_chain
from bapipe.costs.stage_memory import UnitBytes, every_stage_bytes, stage_bytes
from bapipe.costs.stage_time import stage_seconds
from bapipe.errors import BaPipeError
from made_profiles import frozen, made_profile

WEIGHTS = [400.0, 800.0, 1200.0, 1600.0]
TRAINED = [0.0, 0.0, 120.0, 40.0]


def _profile(trained: list[float] | None) -> Profile:
    made = made_profile(
        {"a": [3.0, 6.0, 9.0, 12.0]}, weights=WEIGHTS, boundary=[10.0] * 4, saved_activations=[50.0] * 4
    )
    return made if trained is None else frozen(made, trained)


def _chain(trained: list[float] | None) -> Chain:
    return make_chain(_profile(trained), ["a"], 1)


def test_a_stage_holds_frozen_weights_once() -> None:
    """Weights, gradients and Adam's two moments: four copies of what is trained, one of the rest."""
    chain = _chain(TRAINED)
    for first, last in ((0, 3), (0, 1), (2, 3), (1, 2)):
        own = slice(first, last + 1)
        expected = sum(WEIGHTS[own]) + 3 * sum(TRAINED[own])
        assert stage_bytes(chain, first, last).static(4.0) == expected
        assert UnitBytes.of(chain).always(4.0)[own].sum() == expected
        assert stage_weights(chain, first, last) == sum(WEIGHTS[own])
        assert stage_gradients(chain, first, last) == sum(TRAINED[own])
        assert every_stage_bytes(chain, parted=False)["trained"][first, last] == sum(TRAINED[own])


@pytest.mark.parametrize("trained, copied", [(100.0, 100.0), (400.0, 100.0), (0.0, 0.0), (30.0, 30.0)])
def test_the_copy_of_a_tied_weight_is_trained_as_far_as_its_holder_is(trained: float, copied: float) -> None:
    """An embedding of 100 bytes that is tied to the head stands in one layer with a frozen one of positions."""
    profile = _profile([trained, 0.0, 120.0, 0.0])
    first = profile.layers[0].name
    head = replace(profile.layers[3], shares_weights_with=first, weight_bytes=100.0)
    chain = make_chain(replace(profile, layers=(*profile.layers[:3], head)), ["a"], 1)
    assert stage_bytes(chain, 2, 3).weights == 1200.0 + 100.0
    assert stage_bytes(chain, 2, 3).trained == 120.0 + copied
    assert every_stage_bytes(chain, parted=False)["trained"][2, 3] == 120.0 + copied


def test_without_the_field_all_is_trained() -> None:
    chain = _chain(None)
    assert chain.trainable_bytes.tolist() == WEIGHTS
    assert chain.answered.all()
    assert stage_bytes(chain, 1, 2).static(4.0) == 4 * (800 + 1200)
    same = _chain(WEIGHTS)
    assert same.trainable_bytes.tolist() == WEIGHTS
    assert same.answered[:-1].all()


def test_no_gradient_goes_back_over_a_cut_that_nothing_before_is_trained_of() -> None:
    chain = _chain(TRAINED)
    assert chain.answered[:-1].tolist() == [False, False, True]
    assert chain.return_seconds(5.0, 7.0)[:-1].tolist() == [0.0, 0.0, 10 / 5 + 7]
    assert chain.sends_gradient.tolist() == [False, False, False, True]


def test_a_stage_that_sends_no_gradient_defers_its_whole_backward() -> None:
    seconds = stage_seconds(_chain(TRAINED), [(0, 1), (1, 2), (2, 2), (3, 3)])
    assert seconds.backward.tolist() == pytest.approx([0.0, 6.0, 6.0, 8.0])
    assert seconds.weight_gradient.tolist() == pytest.approx([0.0, 6.0, 6.0, 4.0])
    middle, last = (stage_bytes(_chain(TRAINED), index, index) for index in (2, 3))
    assert middle.delayed == 50 + 10, "all that is saved, and the error, as at a first stage"
    assert last.delayed == 50


def test_a_frozen_layer_has_no_weight_gradient() -> None:
    chain = _chain([40.0, 0.0, 0.0, 40.0])
    assert chain.answered[:-1].all(), "the first layer is trained"
    seconds = stage_seconds(chain, [(1, 2)])
    assert seconds.weight_gradient.tolist() == [0.0]
    assert seconds.backward.tolist() == pytest.approx([5.0]), "its input gradient only"


def test_shares_of_a_split_layer_train_their_share() -> None:
    made = made_profile({"a": [3.0, 6.0]}, weights=[400.0, 800.0], boundary=[10.0] * 2, split={1: 4})
    chain = make_chain(frozen(made, [0.0, 80.0]), ["a"], 1, split={1: 4})
    assert chain.trainable_bytes.tolist() == [0.0, 20.0, 20.0, 20.0, 20.0]


def test_the_field_is_written_read_and_checked(tmp_path: Path) -> None:
    profile, path = _profile(TRAINED), tmp_path / "profile.json"
    write_profile(profile, path)
    assert read_profile(path) == profile
    assert np.array_equal(profile.gradient_bytes, TRAINED)
    table = replace(profile.accelerators["a"], trainable_bytes=(0.0, 0.0, 1200.5, 0.0))
    write_profile(replace(profile, accelerators={"a": table}), path)
    with pytest.raises(BaPipeError, match=r"trainable_bytes is wrong: 1200\.5 of 1200 bytes of layer 'layer2'"):
        read_profile(path)
