"""The exhaustive model check: the checker's verdict on an order is what an explicit model of the ranks does.

README.md says what is compared. Writes result-model-check.json here (or --out).
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from order_cases import all_orders, generated, known_deadlock, random_order
from order_model import DISCIPLINES, UNBOUNDED, gets_to_its_end, processes_of, reachable_ends

from bapipe.schedule.actions import Schedule
from bapipe.schedule.channel_window import ChannelBounds, evaluation_order, stops_at
from bapipe.schedule.validate import Sends, check

__all__ = ["Check", "tiny_placements"]

HERE = Path(__file__).resolve().parent
BOUNDS = tuple(
    ChannelBounds(ahead=ahead, window=window) for ahead, window in itertools.product((1, 2), (0, 1, 2, 3))
)


class Check:
    """Compares verdicts and counts them; `rule` is what the checker is to assume of sends."""

    def __init__(self, *, rule: Sends = "windowed", transports: Collection[str] = tuple(DISCIPLINES)) -> None:
        self.rule, self.transports = rule, tuple(transports)
        self.counts: Counter[str] = Counter()
        self.different: list[str] = []
        """orders on which checker and model do not agree"""
        self.states = 0
        """explored, of all interleavings"""

    def order(self, name: str, schedule: Schedule, *, every_interleaving: bool = False) -> None:
        """One order: as the checker judges it, over every transport, twice in a row, and as it is evaluated."""
        self.counts["orders"] += 1
        sound = not check(schedule)
        self._compare(f"{name}, sends never block", sound, schedule, bounds=UNBOUNDED, training=True)
        if schedule.concurrency != "none" or not sound:
            self.counts["deadlocks"] += not sound
            return  # the runtime has one lane per rank, and no window mends an order
        passes = not check(schedule, sends=self.rule)
        self.counts["deadlocks"] += not passes
        for transport in self.transports:
            self._compare(f"{name}, {transport}", passes, schedule, training=True, transport=transport)
        if every_interleaving:
            self._explore(name, schedule)
        self._compare(f"{name}, two global batches", passes, schedule, training=True, batches=2)
        evaluated = {(rank,): order for rank, order in evaluation_order(schedule).items()}
        self._compare(f"{name}, evaluated", True, schedule, training=False, orders=evaluated)

    def bounds(self, name: str, schedule: Schedule) -> None:
        """The checker's own rule with other bounds, under which small orders stop, too, and where no gradient
        comes back over some boundary."""
        boundaries = range(schedule.num_stages - 1)
        for bounds in BOUNDS:
            for unanswered in ((), *((boundary,) for boundary in boundaries)):
                stops = bool(stops_at(schedule, bounds=bounds, unanswered=unanswered))
                self.counts["verdicts of other bounds"] += 1
                self.counts["deadlocks of other bounds"] += stops
                label = f"{name}, {bounds}, unanswered {unanswered}"
                self._compare(label, not stops, schedule, bounds=bounds, training=True, unanswered=unanswered)

    def _compare(self, name: str, passes: bool, schedule: Schedule, **options: Any) -> None:
        self.counts["comparisons"] += 1
        if gets_to_its_end(processes_of(schedule, **options)) != passes:
            self.different.append(name)

    def _explore(self, name: str, schedule: Schedule) -> None:
        """All interleavings end in one state, the one that a single run finds."""
        for transport in self.transports:
            processes = processes_of(schedule, transport=transport)
            try:
                ends, states = reachable_ends(processes)
            except OverflowError:
                self.counts["too many interleavings"] += 1
                continue
            self.states += states
            self.counts["orders explored whole"] += 1
            complete = tuple(len(process.steps) for process in processes)
            if len(ends) != 1 or (ends == {complete}) != gets_to_its_end(processes):
                self.different.append(f"{name}, all interleavings, {transport}")


def tiny_placements() -> Iterator[tuple[tuple[tuple[int, ...], ...], int]]:
    """Pipelines whose orders are few enough to try all: ranks of the stages, and micro-batches."""
    yield ((0,), (1,)), 1
    yield ((0,), (1,)), 2
    yield ((0,), (1,), (2,)), 1
    yield ((0,), (1,), (2,)), 2
    yield ((0,), (1,), (0,), (1,)), 1
    yield ((0,), (1,), (1,), (0,)), 1
    yield ((0,), (1,), (2,), (3,)), 2
    yield ((0,), (1,)), 3


def _campaign(check_one: Check, seeds: Iterable[int]) -> dict[str, Any]:
    parts: dict[str, Any] = {}

    def part(name: str, begun: float, before: Counter[str]) -> None:
        counts = {key: value - before[key] for key, value in sorted(check_one.counts.items())}
        parts[name] = {**{key: value for key, value in counts.items() if value},
                       "seconds": round(time.monotonic() - begun, 1)}  # fmt: skip
        print(name, parts[name], flush=True)

    begun, before = time.monotonic(), Counter(check_one.counts)
    for stages, microbatches in itertools.product(range(1, 5), range(1, 7)):
        for name, schedule in generated(stages, microbatches):
            label = f"{name}, N={stages}, M={microbatches}"
            check_one.order(label, schedule, every_interleaving=stages <= 2 and microbatches <= 2)
            if schedule.concurrency == "none" and not check(schedule):
                check_one.bounds(label, schedule)
    part("generators, N up to 4, M up to 6", begun, before)
    begun, before = time.monotonic(), Counter(check_one.counts)
    for placement, microbatches in tiny_placements():
        for number, schedule in enumerate(all_orders(placement, microbatches)):
            label = f"order {number} of {placement}, M={microbatches}"
            check_one.order(label, schedule, every_interleaving=len(placement) == 2 and microbatches <= 2)
    part("all orders of tiny pipelines", begun, before)
    begun, before = time.monotonic(), Counter(check_one.counts)
    for seed in seeds:
        schedule = random_order(seed)
        check_one.order(f"random {seed}", schedule)
        if seed % 5 == 0:
            check_one.bounds(f"random {seed}", schedule)
    part("random orders, N up to 4, M up to 14", begun, before)
    begun, before = time.monotonic(), Counter(check_one.counts)
    for microbatches in range(2, 12):
        check_one.order(f"known deadlock, M={microbatches}", known_deadlock(microbatches))
    part("the known deadlock, M from 2 to 11", begun, before)
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--random", type=int, default=5000, help="random orders")
    parser.add_argument("--seed", type=int, default=0, help="of the first random order")
    parser.add_argument("--out", type=Path, default=HERE / "result-model-check.json")
    given = parser.parse_args()
    from faults import environment

    checked = Check()
    parts = _campaign(checked, range(given.seed, given.seed + given.random))
    old = Check(rule="preposted")
    for microbatches in range(2, 12):
        old.order(f"M={microbatches}", known_deadlock(microbatches))
    result = {
        "environment": environment(),
        "seeds": [given.seed, given.seed + given.random - 1],
        "orders": checked.counts["orders"],
        "deadlocks": checked.counts["deadlocks"],
        "comparisons": checked.counts["comparisons"],
        "states_explored": checked.states,
        "different": checked.different,
        "parts": parts,
        "different_where_sends_are_said_never_to_block": old.different,
    }
    given.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({key: value for key, value in result.items() if key not in ("parts", "environment")}))
    if checked.different or not old.different:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
