"""Which layers recompute: the choice against all choices."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from bapipe.planner.layer_choice import Span, UnitNeeds, choose_runs, held_bytes

Runs = tuple[tuple[int, int], ...]


def _needs(chance: np.random.Generator, units: int) -> UnitNeeds:
    saved, inputs = (chance.integers(0, most, units).astype(float) for most in (20, 6))
    return UnitNeeds(
        forward=chance.integers(1, 10, units).astype(float),
        saved=saved,
        inputs=inputs,
        shared=np.minimum(inputs, saved) * chance.integers(0, 2, units),
        workspace=chance.integers(0, 8, units).astype(float),
        allowed=chance.random(units) < 0.9,
    )


def _all_runs(needs: UnitNeeds, span: Span, unit: int) -> Iterator[Runs]:
    """Every choice of runs from a unit to the span's last."""
    if unit > span.last:
        yield ()
        return
    yield from _all_runs(needs, span, unit + 1)
    for last in range(unit, span.last + 1):
        if not needs.allowed[last]:
            break
        for others in _all_runs(needs, span, last + 1):
            yield ((unit, last), *others)


def _seconds(needs: UnitNeeds, runs: Runs) -> float:
    return float(sum(needs.forward[first : last + 1].sum() for first, last in runs))


def _held(needs: UnitNeeds, spans: Sequence[Span], runs: Runs) -> float:
    """What is held, unit by unit: the most over the backwards of one micro-batch while all others wait."""
    recomputed = {unit: run for run in runs for unit in range(run[0], run[1] + 1)}

    def kept(unit: int) -> float:
        run = recomputed.get(unit)
        return float(needs.saved[unit] if run is None else needs.inputs[unit] if unit == run[0] else 0.0)

    always = sum(span.inflight * kept(unit) for span in spans for unit in range(span.first, span.last + 1))
    most = always
    for span in spans:
        for unit in range(span.first, span.last + 1):
            run = recomputed.get(unit)
            end = unit if run is None else run[1]
            gone = sum(kept(later) for later in range(end + 1, span.last + 1))
            own = needs.workspace[unit]
            if run is not None:
                own += needs.saved[run[0] : unit + 1].sum() - needs.shared[run[0]]
            most = max(most, always - gone + float(own))
    return most


@pytest.mark.parametrize("seed", range(60))
def test_choice_is_the_best_of_all(seed: int) -> None:
    chance = np.random.default_rng(seed)
    units = int(chance.integers(1, 7))
    needs = _needs(chance, units)
    cut = int(chance.integers(1, units)) if units > 2 and seed % 3 == 0 else units
    edges = [(0, cut - 1), (cut, units - 1)] if cut < units else [(0, units - 1)]
    spans = [Span(first=low, last=high, inflight=float(chance.integers(1, 5))) for low, high in edges]
    room = float(chance.integers(5, 120))
    every = [
        tuple(itertools.chain(*parts))
        for parts in itertools.product(*(_all_runs(needs, s, s.first) for s in spans))
    ]
    fitting = [_seconds(needs, runs) for runs in every if _held(needs, spans, runs) <= room]
    found = choose_runs(needs, spans, room)
    assert (found is None) == (not fitting)
    lightest = choose_runs(needs, spans, room, least_bytes=True)
    assert lightest is not None
    assert lightest.held == pytest.approx(min(_held(needs, spans, runs) for runs in every))
    if found is not None:
        assert found.seconds == pytest.approx(min(fitting))
        assert found.held == pytest.approx(_held(needs, spans, found.runs))
        assert held_bytes(needs, spans, found.runs) == pytest.approx(found.held)
        assert found.held <= room


def test_more_room_repeats_no_more() -> None:
    needs = _needs(np.random.default_rng(7), 40)
    span = [Span(first=0, last=39, inflight=4.0)]
    whole = 4.0 * float(needs.saved.sum())
    times = [choose_runs(needs, span, share * whole) for share in (0.5, 0.6, 0.7, 0.8, 0.9, 1.1)]
    seconds = [found.seconds for found in times if found is not None]
    assert len(seconds) == 6
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[-1] == 0.0
