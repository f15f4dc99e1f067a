"""What a plan loses because layers and links take other times than were measured: writes NOISE.json.

python benchmarks/uncertainty/run.py                     200 random profiles, one truth of each, half an hour
python benchmarks/uncertainty/run.py --noise deviation   errors that are now and then twice as large
python benchmarks/uncertainty/run.py --depth deep        models of 16 to 48 layers
python benchmarks/uncertainty/run.py --profiles 20       fewer

Each profile is a line of NOISE.jsonl (deep-NOISE.jsonl) as soon as it is done, and is not done again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import platform
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from bapipe.analysis.calibrate import ShortRun, calibrate
from bapipe.analysis.recalibrate import predict_again
from bapipe.costs.fields import COST_FIELDS, as_tuples
from bapipe.costs.profile import CostTable, Profile, ProfiledLayer
from bapipe.costs.segments import make_chain
from bapipe.hardware.cluster import Accelerator, AcceleratorType, Cluster, Link
from bapipe.models.layers import ModelRef
from bapipe.planner import Exploration, Request, explore, make_plan, race_candidates
from bapipe.planner.candidate import Candidate, Hardware
from bapipe.planner.evaluate import evaluate
from bapipe.planner.plan_timeline import plan_timeline
from bapipe.planner.race import unraced_evaluations
from bapipe.planner.scenarios import Scenarios, draw_scenarios, known_errors
from bapipe.records.plan import Plan
from bapipe.records.run_record import RunRecord

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "tests" / "helpers"))
from made_runs import made_run  # noqa: E402

LAYER_ERROR, LINK_ERROR = 0.05, 0.3
NOISES = {
    "within": math.sqrt(3),  # factors are drawn evenly from 1 ± error
    "deviation": 1.0,  # lognormal factors, whose standard deviation is the error
}
"""how a truth differs from what was measured: the error over its standard deviation, which plans are made with"""
KNOWN_LAYER_ERROR, KNOWN_LINK_ERROR = 0.03, 0.05
"""relative errors after runs: of a layer as small as `calibrate` has it, and of a link"""
RACED = 6
FURTHER_ROUNDS = 2
DEPTHS = {"shallow": (5, 14), "deep": (16, 48)}
"""fewest and most layers of a profile; those in profiles/h200 have 12 (GNMT-8) to 18 (ResNet-50)"""
SIZES = (1, 2, 4, 8)
TYPES = ("a", "b")


@dataclass(frozen=True)
class Case:
    """A profile and a cluster as they were measured."""

    profile: Profile
    cluster: Cluster
    global_batch: int


@dataclass(frozen=True)
class Regret:
    """Time over that of the best plan for the truth, less one."""

    profile: int
    """seed"""
    nominal: float
    """of the plan that is fastest by the measured times"""
    robust: float
    """of the plan that is chosen with the errors known"""
    raced: float
    """of the fastest of the raced plans"""
    raced_again: float
    """of the fastest after a second round, with the plans that the first round's runs speak for"""
    raced_on: float
    """of the fastest after a third round"""
    expected: float
    """mean regret of the chosen plan by the planner's own scenarios"""
    seconds: tuple[float, float]
    """processor time of planning without errors and with them"""
    runners: tuple[int, ...]
    """plans that were raced in each round"""


def random_case(seed: int, depth: str = "shallow") -> Case:
    """Layers on 2 to 4 accelerators of one or two types, in one node or two, with links of mixed speed."""
    generator, (fewest, most) = np.random.default_rng(seed), DEPTHS[depth]
    layers, count = int(generator.integers(fewest, most + 1)), int(generator.integers(2, 5))
    types = TYPES[: int(generator.integers(1, 3))]
    work = generator.uniform(1e-3, 6e-3, layers)
    fixed = generator.uniform(0.1, 0.6)
    boundary = generator.uniform(0.2e6, 2e6, layers)
    weights = 10 ** generator.uniform(5, 7.3, layers)

    def rows(values: np.ndarray, more: float = 0.0) -> tuple[tuple[float, ...], ...]:
        return tuple(tuple((values * (size + more)).tolist()) for size in SIZES)

    tables = {}
    for index, name in enumerate(types):
        speed = generator.uniform(0.8, 1.2, layers) * (1 + 0.8 * index)
        tables[name] = CostTable(
            source="hand-written",
            description="random",
            microbatches=SIZES,
            forward=rows(work / speed / 3, fixed),
            backward=rows(2 * work / speed / 3, fixed),
            boundary_forward=rows(boundary),
            boundary_backward=rows(boundary),
            saved_activations=rows(boundary),
            update=tuple((weights * 4e-12).tolist()),
        )
    profile = Profile(
        model=ModelRef(name=f"random-{seed}"),
        dtype="fp32",
        layers=tuple(
            ProfiledLayer(name=f"layer{index}", parameters=int(size // 4), weight_bytes=float(size))
            for index, size in enumerate(weights)
        ),
        accelerators=tables,
    )
    two = bool(count == 4 and generator.integers(0, 2))
    kinds = sorted(types[index % len(types)] for index in range(count))
    nodes = ["one", "one", "two", "two"] if two else ["one"] * count
    within = float(10 ** generator.uniform(8.3, 10))
    members = tuple(
        Accelerator(name=f"{node}/{index % 2 if two else index}", type=kind, node=node)
        for index, (kind, node) in enumerate(zip(kinds, nodes, strict=True))
    )
    pairs = {}
    if not two and generator.integers(0, 2):
        pairs[f"{members[0].name} - {members[1].name}"] = Link(bandwidth=within * generator.uniform(0.3, 3))
    cluster = Cluster(
        name="made",
        accelerators=members,
        types={
            name: AcceleratorType(
                name=name,
                kind="gpu",
                flops={"fp32": 1e13},
                memory=1e15,
                memory_bandwidth=9e11,
                execution="synchronous",
            )
            for name in types
        },
        within=Link(bandwidth=within, latency=2e-5),
        between=Link(bandwidth=within * generator.uniform(0.2, 0.6), latency=5e-5) if two else None,
        pairs=pairs,
    )
    return Case(profile, cluster, int(8 * count * 2 ** generator.integers(0, 3)))


def true_profile(profile: Profile, truth: Scenarios) -> Profile:
    """The profile that would have been measured without error."""
    seconds = [name for name, rule in COST_FIELDS.items() if rule.unit == "seconds"]
    tables = {
        name: replace(
            table,
            **{
                field: as_tuples(np.array(getattr(table, field)) * truth.layers[name][0])
                for field in seconds
                if getattr(table, field) is not None
            },
        )
        for name, table in profile.accelerators.items()
    }
    return replace(profile, accelerators=tables)


def draw_truths(case: Case, noise: str, count: int, seed: int) -> Scenarios:
    """The factors of so many truths."""
    request = Request(global_batch=case.global_batch, layer_error=LAYER_ERROR, link_error=LINK_ERROR)
    errors, layers = known_errors(case.profile, case.cluster, request), len(case.profile.layers)
    if noise == "deviation":
        return draw_scenarios(errors, layers, count, seed=seed)
    generator = np.random.default_rng(seed)
    return Scenarios(
        layers={name: generator.uniform(1 - own, 1 + own, (count, layers)) for name, own in errors.layers.items()},
        links=generator.uniform(1 - LINK_ERROR, 1 + LINK_ERROR, (count, len(errors.links))),
    )


def knowing(case: Case, noise: str) -> Request:
    """Plan with the standard errors of that noise."""
    over = NOISES[noise]
    return replace(_request(case), layer_error=LAYER_ERROR / over, link_error=LINK_ERROR / over)


def _request(case: Case) -> Request:
    """As `bapipe auto` asks: what it races, BaPipe runs."""
    return Request(global_batch=case.global_batch, engines=False)


def takes(candidate: Candidate, profile: Profile, hardware: Hardware) -> float:
    """Seconds of a candidate, in its order, by another profile and on another cluster."""
    chain = make_chain(profile, candidate.chain.types, candidate.chain.microbatch)
    return evaluate(replace(candidate, chain=chain), hardware).time


def true_run(plan: Plan, profile: Profile, cluster: Cluster) -> RunRecord:
    """What a run of the plan records."""
    return made_run(plan, plan_timeline(predict_again(plan, profile, cluster)))


def further_rounds(
    found: Exploration, times: Sequence[float], profile: Profile, hardware: Hardware
) -> Iterator[list[float]]:
    """Seconds of the plans of each round of the race after the first, which took `times`, in its order.

    As in a race of real runs: the costs are corrected by all runs so far, and searched again.
    """
    plans, seconds = list(race_candidates(found, RACED)), list(times)
    if len(plans) == 1:
        return
    while True:
        runs = [
            ShortRun(plan=plan, records=(true_run(plan, profile, hardware.cluster),), seconds=own)
            for plan, own in zip(plans, seconds, strict=True)
        ]
        known = calibrate(found.profile, found.hardware.cluster, runs)
        request = replace(found.request, layer_error=KNOWN_LAYER_ERROR, link_error=KNOWN_LINK_ERROR)
        again = explore(known.profile, known.cluster, request)
        more = unraced_evaluations(found, again, plans, beat=min(seconds), limit=RACED - 1)
        new = [takes(own.candidate, profile, hardware) for own in more]
        yield new
        if not new:
            return
        plans += [make_plan(replace(found, best=own, left_out=None)) for own in more]
        seconds += new


def regrets(case: Case, seed: int, truths: int, noise: str) -> list[Regret]:
    """Of one case under random truths."""
    request = _request(case)
    begin = time.process_time()
    nominal = explore(case.profile, case.cluster, request)
    middle = time.process_time()
    robust = explore(case.profile, case.cluster, knowing(case, noise))
    seconds = middle - begin, time.process_time() - middle
    assert robust.outlook is not None
    outlook = robust.outlook
    raced = outlook.race(RACED, worth=robust.tuning.race_gain)
    expected = float((outlook.times[0] / outlook.times.min(axis=0)).mean()) - 1
    found = []
    for number in range(truths):
        truth = draw_truths(case, noise, 1, seed=1_000_000 + 1000 * seed + number)
        profile, hardware = true_profile(case.profile, truth), truth.hardware(nominal.hardware, 0)
        first, second, *others = (
            takes(one.candidate, profile, hardware) for one in (nominal.best, robust.best, *raced)
        )
        more = list(itertools.islice(further_rounds(robust, others, profile, hardware), FURTHER_ROUNDS))
        fastest = list(itertools.accumulate([min(others), *(min(own, default=math.inf) for own in more)], min))
        fastest += fastest[-1:] * (1 + FURTHER_ROUNDS - len(fastest))
        best = min(explore(profile, hardware.cluster, request).best.time, first, second, fastest[-1])
        found.append(
            Regret(
                profile=seed,
                nominal=first / best - 1,
                robust=second / best - 1,
                raced=fastest[0] / best - 1,
                raced_again=fastest[1] / best - 1,
                raced_on=fastest[2] / best - 1,
                expected=expected,
                seconds=seconds,
                runners=(len(raced), *(len(more[index]) if index < len(more) else 0 for index in (0, 1))),
            )
        )
    return found


def summary(found: Sequence[Regret]) -> dict[str, object]:
    """Mean, 95th percentile and worst of each way to choose."""

    def figures(values: Sequence[float]) -> dict[str, float]:
        return {
            "mean": statistics.mean(values),
            "percentile_95": float(np.percentile(values, 95)),
            "worst": max(values),
            "best_chosen": sum(value < 1e-9 for value in values) / len(values),
        }

    return {
        "cases": len(found),
        "nominal": figures([one.nominal for one in found]),
        "robust": figures([one.robust for one in found]),
        "raced": figures([one.raced for one in found]),
        "raced_again": figures([one.raced_again for one in found]),
        "raced_on": figures([one.raced_on for one in found]),
        "expected": statistics.mean(one.expected for one in found),
        "runners": [statistics.mean(one.runners[index] for one in found) for index in range(1 + FURTHER_ROUNDS)],
        "planning_seconds": [statistics.mean(one.seconds[index] for one in found) for index in (0, 1)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profiles", type=int, default=200)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--truths", type=int, default=1)
    parser.add_argument("--noise", choices=list(NOISES), default="within")
    parser.add_argument("--depth", choices=list(DEPTHS), default="shallow")
    parser.add_argument("--out", help="NOISE.json beside this file unless given")
    options = parser.parse_args()
    name = options.noise if options.depth == "shallow" else f"{options.depth}-{options.noise}"
    out = Path(options.out or HERE / f"{name}.json")
    lines = out.with_suffix(".jsonl")
    known = [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []
    found = [Regret(**row) for row in known if row["profile"] < options.profiles]
    done = {one.profile for one in found}
    for seed in range(options.first, options.profiles):
        if seed in done:
            continue
        new = regrets(random_case(seed, options.depth), seed, options.truths, options.noise)
        with lines.open("a") as file:
            file.writelines(json.dumps(asdict(one)) + "\n" for one in new)
        found += new
    result = {
        "environment": {
            "python": sys.version.split()[0],
            "numpy": np.__version__,
            "machine": platform.machine(),
        },
        "noise": options.noise,
        "layers": DEPTHS[options.depth],
        "layer_error": LAYER_ERROR,
        "link_error": LINK_ERROR,
        "truths": options.truths,
        **summary(sorted(found, key=lambda one: one.profile)),
    }
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
