"""Every plan of a small partitioning problem, one by one, straight from the definition of its time.

Shares no code with the solver: sums are taken layer by layer, stages are laid from the end of the network to its
start in every way the rules allow, and the time is put together at the end.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from bapipe.planner.partition.exact.solve import Problem

__all__ = ["Piece", "Plan", "plans", "time_of"]


class Piece(NamedTuple):
    """One stage."""

    first: int
    stop: int
    type: int
    replicas: int
    recompute: bool


Plan = tuple[Piece, ...]


def plans(problem: Problem) -> Iterator[Plan]:
    """Yield every plan that keeps counts, order, cuts and memory, in no particular order."""
    if problem.order is None:
        yield from _extend(problem, (), list(problem.counts), None)
    else:
        for end in range(1, len(problem.order) + 1):
            yield from _extend(problem, (), [], end)


def _extend(problem: Problem, tail: Plan, left: list[int], place: int | None) -> Iterator[Plan]:
    """Lay one more stage in front of `tail`; `place` is how much of the chain is in front of it."""
    stop = tail[0].first if tail else problem.layers
    used = sum(piece.replicas for piece in tail)
    if stop == 0:
        whole = used == int(sum(problem.counts)) or not problem.use_all
        if whole and problem.num_stages in (None, len(tail)):
            yield tail
        return
    if tail and math.isinf(problem.send_forward[stop - 1] + problem.send_backward[stop - 1]):
        return
    if problem.num_stages is not None and len(tail) == problem.num_stages:
        return
    flags = {"never": (False,), "allowed": (False, True), "always": (True,)}[problem.recompute]
    for type_, replicas in _teams(problem, left, place):
        rest = list(left)
        if place is None:
            rest[type_] -= replicas
        for flag in flags:
            for first in range(stop):
                piece = Piece(first, stop, type_, replicas, flag)
                if _memory(problem, piece, used + replicas) <= problem.capacity[type_]:
                    ahead = None if place is None else place - replicas
                    yield from _extend(problem, (piece, *tail), rest, ahead)


def _teams(problem: Problem, left: list[int], place: int | None) -> Iterator[tuple[int, int]]:
    """Which type, and how many replicas, the stage in front may have."""
    if place is None:
        for type_, count in enumerate(left):
            for replicas in range(1, min(count, problem.max_replicas) + 1):
                yield type_, replicas
        return
    assert problem.order is not None
    for replicas in range(1, min(place, problem.max_replicas) + 1):
        team = set(problem.order[place - replicas : place])
        if len(team) == 1:
            yield team.pop(), replicas


def _memory(problem: Problem, piece: Piece, behind: int) -> int:
    live = math.ceil(min(problem.microbatches, int(problem.inflight[behind])) / piece.replicas)
    saved_activations = sum(int(problem.saved_bytes[layer]) for layer in range(piece.first, piece.stop))
    memory = sum(int(problem.weights_bytes[layer]) for layer in range(piece.first, piece.stop))
    memory += int(problem.overhead[piece.type])
    if piece.recompute:
        return memory + live * int(problem.input_bytes[piece.first]) + saved_activations
    return memory + live * saved_activations


def time_of(problem: Problem, plan: Plan) -> tuple[float, float, float]:
    """Return Φ, B and Ω of a plan."""
    micro = problem.microbatches
    fill, busy, finish = 0.0, [0.0], [0.0]
    for index, piece in enumerate(plan):
        work = step = 0.0
        for layer in range(piece.first, piece.stop):
            forward = float(problem.forward[piece.type, layer])
            work += forward + float(problem.backward[piece.type, layer]) + piece.recompute * forward
            step += float(problem.update[piece.type, layer])
            step += float(problem.reduce_rate[piece.replicas]) * float(problem.gradient_bytes[layer])
        fill += work
        finish.append(step)
        if index < len(plan) - 1:
            there = float(problem.send_forward[piece.stop - 1])
            back = float(problem.send_backward[piece.stop - 1])
            fill += there + back
            link = there + back if problem.duplex_half else max(there, back)
            busy.append((math.ceil(micro / min(piece.replicas, plan[index + 1].replicas)) - 1) * link)
            if problem.count_communication == "exposed":
                work += there + back
        busy.append((math.ceil(micro / piece.replicas) - 1) * work)
    return fill, max(busy), max(finish)
