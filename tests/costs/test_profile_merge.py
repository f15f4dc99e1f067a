"""Profiles of several machines become one; what is not the same model is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bapipe.costs.profile import CostTable, Profile, ProfiledLayer
from bapipe.costs.profile_merge import merge_profiles
from bapipe.errors import BaPipeError
from bapipe.models.layers import ModelRef


def table(*sizes: int, seconds: float = 1.0, **changes: object) -> CostTable:
    rows = tuple((seconds * size, seconds * size) for size in sizes)
    values: dict[str, object] = {
        "source": "measured",
        "description": "here",
        "microbatches": sizes,
        "forward": rows,
        "backward": rows,
        "weight_gradient": rows,
        "boundary_forward": rows,
        "boundary_backward": rows,
        "saved_activations": rows,
        "update": (0.0, 0.0),
        "workspace": tuple(float(size) for size in sizes),
    }
    return CostTable(**{**values, **changes})  # type: ignore[arg-type]


def profile(fingerprint: str | None = "abc", dtype: str = "fp32", **accelerators: CostTable) -> Profile:
    layers = tuple(ProfiledLayer(name=name, parameters=4, weight_bytes=16.0) for name in ("a", "b"))
    return Profile(
        model=ModelRef(name="m", fingerprint=fingerprint), dtype=dtype, layers=layers, accelerators=accelerators
    )


def test_types_come_together() -> None:
    merged = merge_profiles([profile(None, v100=table(1, 2)), profile("abc", h200=table(4))])
    assert list(merged.accelerators) == ["v100", "h200"]
    assert merged.model.fingerprint == "abc"
    assert merged.at("v100", 2).forward.tolist() == [2.0, 2.0]


def test_sizes_of_one_type_are_joined_in_order() -> None:
    older = profile(v100=table(1, 4, not_fitting=(8, 16)))
    later = profile(v100=table(2, 8, seconds=3.0, description="there"))
    found = merge_profiles([older, later]).accelerators["v100"]
    assert found.microbatches == (1, 2, 4, 8)
    assert [row[0] for row in found.forward] == [1.0, 6.0, 4.0, 24.0]
    assert found.workspace == (1.0, 2.0, 4.0, 8.0)
    assert found.not_fitting == (16,)
    assert found.description == "here | there"


def test_the_same_size_twice_needs_replace() -> None:
    older, later = profile(v100=table(1, 4)), profile(v100=table(4, seconds=2.0))
    with pytest.raises(BaPipeError, match=r"two profiles have costs for 'v100' at micro-batch 4; .*--replace"):
        merge_profiles([older, later])
    found = merge_profiles([older, later], replace_older=True).accelerators["v100"]
    assert [row[0] for row in found.forward] == [1.0, 8.0]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (profile("xyz"), r"differ in fingerprint \(abc, xyz\)"),
        (profile(dtype="bf16"), "are of fp32 and bf16"),
        (replace(profile(), layers=profile().layers[:1]), "have 2 and 1 layers"),
        (
            replace(
                profile(), layers=(profile().layers[0], ProfiledLayer(name="c", parameters=4, weight_bytes=16.0))
            ),
            "differ at layer 'b' .* and 'c'",
        ),
        (profile(v100=table(8, source="analytic")), "the costs for 'v100' are measured and analytic"),
    ],
)
def test_what_is_not_the_same_is_refused(other: Profile, message: str) -> None:
    with pytest.raises(BaPipeError, match=message):
        merge_profiles([profile(v100=table(1)), other])


def test_nothing_to_merge() -> None:
    with pytest.raises(BaPipeError, match="nothing to merge"):
        merge_profiles([])


@pytest.mark.parametrize(("spreads", "merged"), [((None, None), None), ((None, 0.02), 0.02), ((0.05, 0.02), 0.05)])
def test_the_larger_known_spread_counts(spreads: tuple[float | None, float | None], merged: float | None) -> None:
    one, two = (profile(x=table(size, spread=spread)) for size, spread in zip((1, 2), spreads, strict=True))
    assert merge_profiles([one, two]).table("x").spread == merged


def test_a_spread_is_a_share() -> None:
    with pytest.raises(BaPipeError, match=r"spread is wrong: 1\.5"):
        profile(x=table(1, spread=1.5))
