"""Scenarios: what layers and transfers may really take, given how well their times are known.

Each layer's time on each accelerator type, and each link's transfers, are multiplied by a factor of their own:
lognormal, 1 in the median, with the relative standard deviation that the profile, the cluster or the request has
as its error. All candidates are timed in the same scenarios, so that what two of them have in common cancels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from bapipe.costs.fields import COST_FIELDS
from bapipe.costs.profile import Profile
from bapipe.costs.segments import Chain, Floats
from bapipe.hardware.cluster import Cluster, Link
from bapipe.planner.candidate import Hardware
from bapipe.planner.candidate_costs import run_costs
from bapipe.planner.evaluate import Evaluation
from bapipe.planner.plan_network import network_of
from bapipe.planner.request import Request
from bapipe.simulator.action_costs import Costs
from bapipe.simulator.lowering import Network
from bapipe.simulator.scenario_times import scenario_times

__all__ = ["Errors", "Scenarios", "draw_scenarios", "edge_scenarios", "known_errors"]

_FEW_LINKS = 4
"""links that are known with an error up to which each is changed alone, too"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """How well times are known: relative standard errors."""

    layers: dict[str, float] = field(default_factory=dict)
    """of one layer's time, by accelerator type"""
    links: tuple[float, ...] = ()
    """of a transfer, by link, in the order of `Cluster.with_links`"""

    @property
    def any(self) -> bool:
        return any(self.layers.values()) or any(self.links)

    @property
    def largest(self) -> tuple[float, float]:
        """Of a layer, and of a link."""
        return max(self.layers.values(), default=0.0), max(self.links, default=0.0)


def known_errors(profile: Profile, cluster: Cluster, request: Request) -> Errors:
    """As the request says, else as the profile and the cluster have them; 0 where nobody says."""
    types = dict.fromkeys(item.type for item in cluster.accelerators)
    layers = {
        name: (profile.table(name).spread or 0.0) if request.layer_error is None else request.layer_error
        for name in types
    }
    links: list[float] = []

    def seen(link: Link) -> Link:
        links.append(link.spread if request.link_error is None else request.link_error)
        return link

    cluster.with_links(seen)
    return Errors(layers=layers, links=tuple(links))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scenarios:
    """The factors of each scenario."""

    layers: dict[str, Floats]
    """[scenario, layer] by accelerator type: what every time of the layer is multiplied by"""
    links: Floats
    """[scenario, link] what a transfer's time is multiplied by, in the order of `Cluster.with_links`"""

    def __len__(self) -> int:
        return len(self.links)

    def and_also(self, others: Scenarios) -> Scenarios:
        """These, and then the others."""
        layers = {name: np.concatenate([own, others.layers[name]]) for name, own in self.layers.items()}
        return Scenarios(layers=layers, links=np.concatenate([self.links, others.links]))

    def chain(self, chain: Chain, number: int) -> Chain:
        """The chain with its times in one scenario; bytes stay."""
        layers = [unit.layer for unit in chain.units]
        factors = np.stack([self.layers[name][number] for name in chain.types])[:, layers]
        seconds = (name for name, rule in COST_FIELDS.items() if rule.unit == "seconds")
        return replace(chain, **{name: getattr(chain, name) * factors for name in seconds})

    def hardware(self, hardware: Hardware, number: int) -> Hardware:
        """The cluster with its links in one scenario.

        Rates of collectives of their own change as the links that cross the most accelerators, a bus as the
        links within a node.
        """
        factors = [float(factor) for factor in self.links[number]]
        remaining = iter(factors)

        cluster = hardware.cluster
        across = factors[0] if cluster.between is None else factors[1]
        slowed = replace(
            cluster.with_links(lambda link: link.slower(next(remaining))),
            collective_bandwidth=_over(cluster.collective_bandwidth, across),
            collective_rates=cluster.collective_rates.slower(across),
            fsdp_units=None if cluster.fsdp_units is None else cluster.fsdp_units.slower(across),
            bus_bandwidth=_over(cluster.bus_bandwidth, factors[0]),
        )
        return replace(hardware, cluster=slowed)

    def times(self, evaluations: Sequence[Evaluation], hardware: Hardware) -> Floats:
        """[evaluation, scenario] seconds of a global batch; orders and memory are those of the evaluation."""
        costs: list[list[Costs]] = [[] for _ in evaluations]
        networks: list[list[Network]] = [[] for _ in evaluations]
        for number in range(len(self)):
            changed = self.hardware(hardware, number)
            chains: dict[int, Chain] = {}
            # Costs depend on the stages alone and routes on the ranks', which many schedules share.
            timed: dict[tuple[object, ...], Costs] = {}
            routed: dict[tuple[object, ...], Network] = {}
            for index, evaluation in enumerate(evaluations):
                candidate, schedule = evaluation.candidate, evaluation.schedule
                own, ranks = candidate.chain, evaluation.ranks
                if id(own) not in chains:
                    chains[id(own)] = self.chain(own, number)
                how = (candidate.zero, candidate.engine)
                staged = (id(own), candidate.stages, schedule.flushes, schedule.dealing, *how)
                placed = (ranks, schedule.placement, schedule.dealing)
                if staged not in timed:
                    simulated = schedule.num_ranks // candidate.schedule.num_ranks
                    timed[staged] = run_costs(
                        replace(candidate, chain=chains[id(own)]), changed, simulated=simulated
                    )
                if placed not in routed:
                    routed[placed] = network_of(changed.cluster, ranks, schedule, evaluation.crowding)
                costs[index].append(timed[staged])
                networks[index].append(routed[placed])
        return np.stack(
            [
                scenario_times(evaluation.schedule, costs[index], networks[index])
                for index, evaluation in enumerate(evaluations)
            ]
        )


def _over(rate: float | None, factor: float) -> float | None:
    return None if rate is None else rate / factor


def draw_scenarios(errors: Errors, layers: int, count: int, *, seed: int) -> Scenarios:
    """So many scenarios, always the same for one seed; every second one mirrors the one before it."""
    generator = np.random.default_rng(seed)

    def factors(width: int, spreads: Sequence[float] | float) -> Floats:
        half = generator.standard_normal((-(-count // 2), width))
        drawn = np.stack([half, -half], axis=1).reshape(-1, width)[:count]
        return np.asarray(np.exp(drawn * np.sqrt(np.log1p(np.square(spreads)))), dtype=np.float64)

    by_type = {name: factors(layers, spread) for name, spread in errors.layers.items()}
    return Scenarios(layers=by_type, links=factors(len(errors.links), errors.links))


def edge_scenarios(errors: Errors, layers: int, *, by: float) -> Scenarios:
    """All links together and each alone, slower and faster by so many standard errors; layers as measured.

    Links that are known exactly stay as they are, and where many are not, none is changed alone.
    """
    spreads = np.sqrt(np.log1p(np.square(errors.links)))
    unsure = np.flatnonzero(spreads)
    alone = np.eye(len(spreads))[unsure] if 1 < len(unsure) <= _FEW_LINKS else np.zeros((0, len(spreads)))
    together = np.ones((min(1, len(unsure)), len(spreads)))
    factors = np.exp(by * spreads * np.concatenate([together, alone]))
    count = 2 * len(factors)
    return Scenarios(
        layers={name: np.ones((count, layers)) for name in errors.layers},
        links=np.concatenate([factors, 1 / factors]),
    )
