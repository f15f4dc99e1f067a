"""What a search knows: the question, and what its passes have added so far."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from bapipe.costs.profile import Profile
from bapipe.costs.recomputed_layers import as_runs, recomputing
from bapipe.costs.segments import Chain, Floats, make_chain
from bapipe.costs.stage_memory import UnitBytes
from bapipe.costs.stage_time import UnitSeconds
from bapipe.hardware.cluster import Cluster
from bapipe.planner.candidate import Candidate, Hardware
from bapipe.planner.data_parallel import Estimate
from bapipe.planner.evaluate import Evaluation, evaluate
from bapipe.planner.incumbents import Incumbents
from bapipe.planner.outlook import Outlook
from bapipe.planner.partition.paper.inter_layer import ideal_time
from bapipe.planner.partition.paper.step_record import Step
from bapipe.planner.request import Request
from bapipe.planner.scenarios import Errors
from bapipe.planner.tuning import DEFAULT_TUNING, Tuning

__all__ = ["SearchState", "SizeScope", "ideal_seconds"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SizeScope:
    """One micro-batch size, at one depth or at any: what its candidates have in common."""

    chain: Chain
    microbatches: int
    request: Request
    """as asked, with the depth at hand as `stages`"""
    bound: float
    """seconds that no candidate of this size can beat"""


@dataclass(slots=True, kw_only=True, eq=False)
class SearchState:
    """The question of one search, which stays, and its answer, which each pass completes."""

    profile: Profile
    hardware: Hardware
    request: Request
    global_batch: int
    """samples of one optimizer step, all accelerators together"""
    sizes: tuple[int, ...]
    """micro-batch sizes that the profile and the global batch allow"""
    tuning: Tuning = DEFAULT_TUNING
    to_copy: bool = False
    """whether only plans are looked for that run in several replicas"""
    straight: bool = False
    """whether only those with one stage per accelerator are"""
    explain: bool = False
    """whether the paper's exploration is recorded too"""
    errors: Errors = field(default_factory=Errors)
    """how well times are known"""
    progress: Callable[[str, float], None] | None = None
    """called with what the search by simulation has found, and the share of its effort that is spent"""

    chains: dict[int, Chain] = field(default_factory=dict)
    """the segments and their costs by micro-batch size, each made once"""
    tried_sizes: tuple[int, ...] = ()
    """micro-batch sizes that are searched, the most promising first; `choose_sizes` sets it"""
    incumbents: Incumbents = field(init=False)
    """the best evaluation of every family, with its timeline and memory, and how many were simulated"""
    outlook: Outlook | None = None
    """what candidates take where times are not exact; `weigh_errors` sets it where an error is known"""
    choice: Evaluation | None = None
    """the plan that loses least by these errors; `weigh_errors` sets it likewise"""
    estimates: tuple[Estimate, ...] = ()
    """alternatives that BaPipe does not run; `estimate_alternatives` sets it"""
    engines: list[Evaluation] = field(default_factory=list)
    """what ZeRO-1, DDP and FSDP2 take where they are not among the incumbents, to be listed; `share_states` and
    `try_engines` add to it"""
    unsearched: float | None = None
    """seconds per sample that plans which the search by simulation left out may take at least; infinite where it
    left out none, None where there was no such search; `search_cuts` sets it"""
    paper_steps: tuple[Step, ...] = ()
    """how the paper's best partition came about; `record_paper_steps` sets it"""

    def __post_init__(self) -> None:
        self.incumbents = Incumbents(self.tuning, margin=self.margin)

    @property
    def cluster(self) -> Cluster:
        return self.hardware.cluster

    @property
    def paper(self) -> bool:
        """Whether the search keeps to the space of the paper."""
        return self.request.space == "paper"

    @property
    def margin(self) -> float:
        """Share of the best time by which a candidate may be slower and still turn out the fastest."""
        return self.tuning.near_errors * sum(self.errors.largest)

    @property
    def best(self) -> Evaluation:
        """The plan so far; only asked for once there is one (`require_plan`)."""
        best = self.choice or self.incumbents.best
        assert best is not None
        return best

    def thorough(self, layers: int) -> bool:
        """Whether a problem of so many layers is small enough to try more than the exact partition."""
        return layers * len(self.cluster) <= self.tuning.thorough_size

    def chain(self, size: int) -> Chain:
        """The segments at a micro-batch size."""
        if size not in self.chains:
            forced = as_runs(self.request.forced_layers(len(self.profile.layers)))
            self.chains[size] = recomputing(make_chain(self.profile, _types(self.cluster), size), forced)
        return self.chains[size]

    def scope(self, size: int) -> SizeScope:
        """A micro-batch size at the depth that is asked for."""
        chain = self.chain(size)
        return SizeScope(
            chain=chain,
            microbatches=self.global_batch // size,
            request=self.request,
            bound=0.0 if self.paper else self.perfect_time(chain),
        )

    def perfect_time(self, chain: Chain, depth: int | None = None) -> float:
        """Seconds that no plan of this micro-batch size, on so many accelerators, beats.

        They split the work perfectly and never communicate.
        """
        return self.global_batch / chain.microbatch * ideal_seconds(chain, self.cluster, depth)

    def static_bytes(self, chain: Chain) -> Floats:
        """Of each unit, weights, gradients and optimizer state, none of them shared."""
        return UnitBytes.of(chain).always(self.hardware.static_copies())

    def too_large(self, chain: Chain) -> bool:
        """Whether no pipeline without replicas fits, however it is cut: weights, gradients and optimizer state of
        one unit alone are more than every accelerator has, or those of all more than all have together."""
        memories = [self.cluster.type_of(index).memory for index in range(len(self.cluster))]
        needed = self.static_bytes(chain)
        return float(needed.max()) > max(memories) or float(needed.sum()) > sum(memories)

    def consider(self, family: str, candidate: Candidate) -> None:
        """Simulate a candidate unless it was already, and keep it if it is the best of its family."""
        if self.incumbents.is_new(candidate):
            self.incumbents.add(family, evaluate(candidate, self.hardware))

    def narrowed(
        self,
        request: Request,
        *,
        sizes: tuple[int, ...],
        cluster: Cluster | None = None,
        to_copy: bool = False,
        straight: bool = False,
    ) -> SearchState:
        """A search of its own for another request, on the same cluster or a part of it; nothing is found yet."""
        hardware = self.hardware if cluster is None else replace(self.hardware, cluster=cluster)
        alike = _types(hardware.cluster) == _types(self.cluster)
        return SearchState(
            profile=self.profile,
            hardware=hardware,
            request=request,
            global_batch=request.global_batch or self.global_batch,
            sizes=sizes,
            tuning=self.tuning,
            to_copy=to_copy,
            straight=straight,
            chains=self.chains if alike else {},
        )


def _types(cluster: Cluster) -> tuple[str, ...]:
    return tuple(dict.fromkeys(item.type for item in cluster.accelerators))


def ideal_seconds(chain: Chain, cluster: Cluster, fastest: int | None = None) -> float:
    """T of equation (1): seconds per micro-batch if the network could be split perfectly (over the fastest)."""
    whole = UnitSeconds.of(chain).work.sum(axis=1)
    return ideal_time(sorted(float(whole[chain.row(item.type)]) for item in cluster.accelerators)[:fastest])
