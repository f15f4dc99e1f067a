"""What transfers say of links: slower links are found again, and what tells nothing is not asked."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bapipe.analysis.link_estimate import FEWEST_TRANSFERS, LinkEstimate, correct_links, estimate_links
from bapipe.analysis.predicted_measured import compare
from bapipe.errors import BaPipeError
from bapipe.hardware.cluster import Accelerator, Cluster, Link
from bapipe.planner import Request, explore, make_plan
from bapipe.planner.plan_timeline import plan_timeline
from bapipe.records.plan import Plan
from bapipe.schedule.generators import SCHEDULES, with_update
from bapipe.schedule.schedule_file import ScheduleFile
from bapipe.simulator.timeline import Timeline
from made_profiles import made_cluster, made_profile
from made_runs import made_run


def _plan(cluster: Cluster, *, stages: int = 4, microbatches: int = 8) -> Plan:
    """Equal stages whose transfers take a while and are waited for."""
    profile = made_profile({"x": [1.0] * 8}, boundary=[0.25] * 8, sizes=(1,))
    request = Request(global_batch=microbatches, microbatch=1, schedule="1f1b-sno", stages=stages)
    return make_plan(explore(profile, cluster, request))


def _two_nodes() -> Cluster:
    """Stages 0 and 1 in node a, 2 and 3 in b; the link between a/0 and a/1 differs."""
    accelerators = tuple(
        Accelerator(name=f"{node}/{index}", type="x", node=node) for node in ("a", "b") for index in (0, 1)
    )
    return replace(
        made_cluster({"x": 4}),
        accelerators=accelerators,
        within=Link(bandwidth=1.0, latency=0.05),
        between=Link(bandwidth=0.5, latency=0.2),
        pairs={"a/0 - a/1": Link(bandwidth=2.0, latency=0.01)},
        topology="chain",
    )


def _slower(cluster: Cluster, *, within: float, between: float, pair: float) -> Cluster:
    def changed(link: Link, ratio: float) -> Link:
        return replace(link, bandwidth=link.bandwidth / ratio, latency=link.latency * ratio)

    assert cluster.between is not None
    return replace(
        cluster,
        within=changed(cluster.within, within),
        between=changed(cluster.between, between),
        pairs={key: changed(link, pair) for key, link in cluster.pairs.items()},
    )


def test_links_that_take_longer_than_described_are_found_again() -> None:
    plan = _plan(_two_nodes())
    true = _slower(plan.cluster, within=2.0, between=3.0, pair=0.5)
    measured = plan_timeline(replace(plan, cluster=true))
    found = compare(plan, made_run(plan, measured)).links
    assert {estimate.link: estimate.ratio for estimate in found} == pytest.approx(
        {"a/0 - a/1": 0.5, "within": 2.0, "between": 3.0}
    )
    assert all(estimate.transfers >= FEWEST_TRANSFERS for estimate in found)
    by_name = {estimate.link: estimate for estimate in found}
    assert by_name["between"].bytes == 0.25
    assert by_name["between"].predicted == pytest.approx(0.7)
    assert by_name["between"].measured == pytest.approx(2.1)
    corrected = correct_links(plan.cluster, found)
    for one, other in (
        (corrected.within, true.within),
        (corrected.between, true.between),
        (corrected.pairs["a/0 - a/1"], true.pairs["a/0 - a/1"]),
    ):
        assert one is not None
        assert other is not None
        assert (one.bandwidth, one.latency) == pytest.approx((other.bandwidth, other.latency))
    again = plan_timeline(replace(plan, cluster=corrected))
    assert again.time == pytest.approx(measured.time, rel=1e-9)


@pytest.mark.parametrize("latency", [0.0, 0.3])
def test_a_link_that_is_always_busy_is_found_again(latency: float) -> None:
    """Every message but the first waits for the one before it, and its receiver is done long before it comes."""
    plan = _plan(replace(made_cluster({"x": 2}), within=Link(bandwidth=1.0, latency=latency)), stages=2)
    slow = replace(plan.cluster, within=Link(bandwidth=1 / 60, latency=60 * latency))
    queued = replace(plan, schedule=ScheduleFile.of(with_update(SCHEDULES["gpipe"](2, 8))))
    measured = plan_timeline(replace(queued, cluster=slow))
    free = measured.previous_end()[measured.consumers()]
    assert ((free > 0) & (free <= measured.transfers.start)).sum() < FEWEST_TRANSFERS
    (found,) = estimate_links(queued, measured)
    assert found.transfers >= FEWEST_TRANSFERS
    assert found.corrected is not None
    assert found.ratio == pytest.approx(60.0, rel=1e-6)


def test_a_link_that_was_described_absurdly_is_corrected_to_what_a_file_may_hold() -> None:
    plan = _plan(replace(made_cluster({"x": 2}), within=Link(bandwidth=1e9, latency=1e18)), stages=2)
    true = replace(plan.cluster, within=Link(bandwidth=1e9, latency=1e-5))
    (found,) = estimate_links(plan, plan_timeline(replace(plan, cluster=true)))
    assert found.corrected is not None
    assert found.corrected.bandwidth == 1e30
    assert found.corrected.latency == pytest.approx(1e-5, rel=1e-3)


def _late(timeline: Timeline, seconds: float) -> Timeline:
    """Every receiver takes note so much later than it could."""
    return replace(timeline, transfers=replace(timeline.transfers, arrival=timeline.transfers.arrival + seconds))


def test_only_transfers_that_were_waited_for_count() -> None:
    """With links of no time nothing is waited for: the receiver's delay is its own."""
    plan = _plan(made_cluster({"x": 2}, bandwidth=1e6), stages=2)
    measured = plan_timeline(plan)
    free = measured.previous_end()[measured.consumers()]
    waited = (free > 0) & (free <= measured.transfers.start)
    assert 0 < waited.sum() < len(measured.transfers)
    (found,) = estimate_links(plan, measured)
    assert found.transfers == waited.sum()
    busy = replace(
        measured,
        transfers=replace(measured.transfers, arrival=measured.transfers.arrival + 5.0 * ~waited),
    )
    assert estimate_links(plan, busy) == (found,)
    assert estimate_links(plan, _late(measured, 5.0))[0].measured == pytest.approx(found.measured + 5.0)


def test_the_first_input_of_a_rank_tells_nothing() -> None:
    plan = _plan(made_cluster({"x": 2}, bandwidth=1.0), stages=2, microbatches=1)
    measured = plan_timeline(plan)
    assert len(measured.transfers) == 2
    (found,) = estimate_links(plan, measured)
    assert found.transfers == 1
    assert found.corrected is None
    with pytest.raises(BaPipeError, match=r"needs 3 transfers over it that were waited for .*, the run has 1"):
        correct_links(plan.cluster, (found,))
    with pytest.raises(BaPipeError, match="the run has 0; run more micro-batches"):
        correct_links(plan.cluster, ())


def test_links_of_a_bus_are_not_corrected() -> None:
    plan = _plan(made_cluster({"x": 2}, bandwidth=1.0, bus_bandwidth=0.5), stages=2)
    (found,) = estimate_links(plan, plan_timeline(plan))
    assert found.ratio == pytest.approx(1.0)
    assert found.corrected is None


def test_what_starts_with_the_compute_is_not_estimated() -> None:
    plan = _plan(made_cluster({"x": 2}, bandwidth=1.0), stages=2)
    streaming = replace(plan, schedule=replace(plan.schedule, sending="cut-through"))
    assert estimate_links(streaming, plan_timeline(streaming)) == ()


def test_other_links_stay() -> None:
    cluster = _two_nodes()
    link = Link(bandwidth=9.0)
    estimate = LinkEstimate(
        link="between", transfers=3, bytes=1.0, predicted=1.0, measured=2.0, ratio=2.0, corrected=link
    )
    corrected = correct_links(cluster, (estimate,))
    assert corrected == replace(cluster, between=link)
