"""The rules of FSDP2 on a model of five layers, drawn by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bapipe.costs.segments import Chain, make_chain
from bapipe.hardware.cluster import FsdpUnits, Link
from bapipe.planner.fsdp_events import fsdp_seconds
from made_profiles import frozen, made_cluster, made_profile

BYTES = 4e9
MODULES = ("entry", "h.0.linear", "h.1.linear", "h.2.linear", "head")


def chain(trained: list[float] | None = None) -> Chain:
    """Forwards of 1 s, backwards of 2 s; three blocks in a list, and two layers that are the root's."""
    profile = made_profile({"x": [3.0] * 5}, weights=[BYTES] * 5, sizes=(1,))
    layers = tuple(replace(layer, modules=(own,)) for layer, own in zip(profile.layers, MODULES, strict=True))
    profile = replace(profile, layers=layers)
    return make_chain(profile if trained is None else frozen(profile, trained), ["x"], 1)


def seconds(of: Chain, bandwidth: float, kind: str = "gpu", units: FsdpUnits | None = None) -> tuple[float, float]:
    cluster = replace(made_cluster({"x": 2}, bandwidth=bandwidth), fsdp_units=units)
    cluster = replace(cluster, types={"x": replace(cluster.types["x"], kind=kind)})
    found = fsdp_seconds(of, cluster, (0, 1), [0])
    return found.forward, found.backward


def test_slow_links() -> None:
    """A unit is gathered or scattered in 4 s, the root in 8 s.

    forward     links     root 0-8, h.0 8-12, h.1 12-16, h.2 16-20
                compute   entry 8-9, h.0 12-13, h.1 16-17, h.2 20-21, head 21-22
    backward    links     h.2 0-4, h.1 4-8, -h.2 8-12, h.0 12-16, -h.1 16-20, -h.0 20-24, -root 24-32
                compute   head 0-2, h.2 4-6, h.1 8-10, h.0 16-18, entry 20-22
    """
    assert seconds(chain(), 0.5e9) == pytest.approx((22, 32))


def test_fast_links_are_hidden_but_at_the_ends() -> None:
    """A unit in 0.4 s, the root in 0.8 s: seen are the root's gather and, after the compute, its scatter."""
    assert seconds(chain(), 5e9) == pytest.approx((5.8, 10.8))


def test_on_cpus_all_is_in_a_row() -> None:
    """A gather takes 4 s a unit, a scatter as much as an all-reduce: 8 s."""
    assert seconds(chain(), 0.5e9, kind="cpu") == pytest.approx((5 + 5 * 4, 10 + 3 * 4 + 5 * 8))


def test_what_a_unit_takes_on_cpus_counts_where_it_is_measured() -> None:
    """Gathers of 1 s and 4 s for 4 GB, scatters of 2 s and 4 s; on GPUs it is hidden."""
    units = FsdpUnits(gather=Link(bandwidth=1e9, latency=1.0), scatter=Link(bandwidth=1e9, latency=2.0))
    blocks, root = 3, 8.0
    forward = 5 + blocks * (1 + 4) + 1 + root
    backward = 10 + blocks * (1 + 4) + blocks * (2 + 4) + 2 + root
    assert seconds(chain(), 0.5e9, kind="cpu", units=units) == pytest.approx((forward, backward))
    assert seconds(chain(), 0.5e9, units=units) == seconds(chain(), 0.5e9)


def test_where_the_first_layers_are_frozen_the_backward_ends_before_them() -> None:
    """Only head and h.2 are trained: h.1 is fetched ahead for nothing, and the root has the head's gradients.

    backward    links     h.2 0-4, h.1 4-8, -h.2 8-12, -root 12-16
    """
    assert seconds(chain([0.0, 0.0, 0.0, BYTES, BYTES]), 0.5e9)[1] == pytest.approx(16)
