"""The dynamic programme of the exact partitioner: the least fill Φ of every suffix within limits.

See exact_kernels for the words. `fill_loops` is written for numba and `fill_arrays` for numpy, with the same
results bit by bit; the other kernels have one source for both.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

__all__ = ["Pruning", "fill_arrays", "fill_loops", "shrink", "to_go", "trace"]


class Pruning(NamedTuple):
    """Which states to leave out: those whose value + rest − credit of their node exceeds the cutoff."""

    active: bool
    coarse: Any
    """[node] coarse node"""
    area: Any
    """of the coarse nodes"""
    rest: Any
    """[coarse state] from to_go"""
    credit: Any
    """[node] charges for the accelerators it leaves over"""
    cutoff: float


def fill_loops(
    width: int,
    net: Any,
    costs: Any,
    memory: Any,
    limits: Any,
    area: Any,
    steady: float,
    exposed: bool,
    charge: Any,
    value: Any,
    log: Any,
    level: Any,
    ends: Any,
    pruning: Any,
) -> None:
    """Set value[offset[node] + position − back[node]], inf before, to the least Φ, plus charges, of that suffix.

    A stage costs work[j] − work[i] + charge, so the best end j for a start i is the least value[j] + cut[j] +
    work[j] between i + 1 and the furthest j that time and memory allow: a range minimum, from a table of minima
    over powers of two (level), O(log of the stage's layers) per state and option and vectorised. With exposed
    communication the ends that keep the limit are no interval, and all are tried. If pruning is active, the area
    shrinks to what it leaves.
    """
    start, before_of, time, memory_of, source, _ = net
    work, row_of, replicas_of, rounds_of_key, _, _, _, cut = costs
    memory_far, _, _ = memory
    far, _, replicas_at, _, _ = limits
    back, front, offset = area
    active, coarse, coarse_area, rest, credit, cutoff = pruning
    coarse_back, _, coarse_offset = coarse_area
    for node in range(len(source)):
        low = back[node]
        high = front[node]
        if high < low:
            continue
        if source[node]:
            value[offset[node]] = 0.0
            continue
        for option in range(start[node], start[node + 1]):
            before = before_of[option]
            least = back[before]
            most = front[before]
            count = min(high, most - 1) - low + 1
            if most < least or count <= 0:
                continue
            key = time[option]
            at = key * width + low
            time_far = far[at : at + count]
            at = memory_of[option] * width + low
            room_far = memory_far[at : at + count]
            longest = 0
            for x in range(count):
                end = min(time_far[x], room_far[x], most)
                ends[x] = end
                longest = max(longest, end - max(low + x + 1, least) + 1)
            if longest <= 0:
                continue
            replicas = replicas_of[key]
            extra = charge[key]
            base = row_of[key]
            size = most - least + 1
            # Slices, because LLVM vectorises loops over them and not over shifted indices.
            own = value[offset[before] : offset[before] + size]
            cuts = cut[least : least + size]
            done = work[base + least : base + least + size]
            needed = replicas_at[least : least + size]
            lowest = level[:size]
            for x in range(size):
                cost = own[x] + cuts[x] + done[x] + extra
                lowest[x] = cost if replicas >= needed[x] else np.inf
            half = 1
            at = 0
            while 2 * half <= longest:
                below = level[at : at + size]
                shifted = level[at + half : at + size]
                at += width
                above = level[at : at + size]
                for x in range(size - 2 * half + 1):
                    one, two = below[x], shifted[x]
                    above[x] = one if one < two else two
                half *= 2
            own = value[offset[node] : offset[node] + count]
            done = work[base + low : base + low + count]
            needed = replicas_at[low : low + count]
            rounds = rounds_of_key[key]
            for x in range(count):
                j = max(low + x + 1, least)
                size = ends[x] - j + 1
                if size <= 0 or replicas < needed[x]:
                    continue
                if exposed:
                    for end in range(j, j + size):
                        cost = lowest[end - least] - done[x]
                        if cost < own[x] and rounds * (work[base + end] - done[x] + cut[end]) <= steady:
                            own[x] = cost
                else:
                    at = log[size] * width + j - least
                    cost = min(level[at], level[at + size - (1 << log[size])]) - done[x]
                    if cost < own[x]:
                        own[x] = cost
        if active:
            own = value[offset[node] : offset[node] + high - low + 1]
            beyond = coarse_offset[coarse[node]] - coarse_back[coarse[node]] + low
            count = 0
            for x in range(len(own)):
                if own[x] + rest[beyond + x] > cutoff + credit[node]:
                    own[x] = np.inf
                else:
                    front[node] = low + x
                    if count == 0:
                        back[node] = low + x
                    count += 1
            if count == 0:
                front[node] = -1
            else:
                offset[node] += back[node] - low


def fill_arrays(
    width: int,
    net: Any,
    costs: Any,
    memory: Any,
    limits: Any,
    area: Any,
    steady: float,
    exposed: bool,
    charge: Any,
    value: Any,
    log: Any,
    level: Any,
    ends: Any,
    pruning: Any,
) -> None:
    """Do as fill_loops, with numpy; value is an array, level and ends are not used."""
    del level, ends
    work, cut, log_of = np.asarray(costs.work), np.asarray(costs.cut), np.asarray(log)
    replicas_at, far = np.asarray(limits.replicas), np.asarray(limits.far)
    back, front, offset = area
    for node in range(len(net.source)):
        low, high = back[node], front[node]
        if high < low:
            continue
        if net.source[node]:
            value[offset[node]] = 0.0
            continue
        for option in range(net.start[node], net.start[node + 1]):
            before = net.before[option]
            least, most = back[before], front[before]
            count = min(high, most - 1) - low + 1
            if most < least or count <= 0:
                continue
            key = net.time[option]
            replicas, base = costs.replicas[key], costs.row[key]
            at, room = key * width + low, net.memory[option] * width + low
            starts = np.arange(low, low + count)
            ends_at = np.minimum(far[at : at + count], memory.far[room : room + count])
            ends_at = np.minimum(ends_at, most)
            first = np.maximum(starts + 1, least)
            sizes = ends_at - first + 1
            good = np.flatnonzero((sizes > 0) & (replicas >= replicas_at[low : low + count]))
            if not len(good):
                continue
            size = most - least + 1
            cost = value[offset[before] : offset[before] + size] + cut[least : most + 1]
            cost = cost + work[base + least : base + most + 1] + charge[key]
            lowest = np.where(replicas >= replicas_at[least : most + 1], cost, np.inf)
            first, ends_at, sizes = first[good] - least, ends_at[good] - least, sizes[good]
            done = work[base + low + good]
            if exposed:
                busy = work[base + least : base + most + 1]
                best = np.full(len(good), np.inf)
                for x in range(len(good)):
                    part = slice(first[x], ends_at[x] + 1)
                    keeps = costs.rounds[key] * (busy[part] - done[x] + cut[least : most + 1][part]) <= steady
                    best[x] = np.min(lowest[part] - done[x], initial=np.inf, where=keeps)
            else:
                levels = [lowest]
                while 2 << (len(levels) - 1) <= sizes.max():
                    half = 1 << (len(levels) - 1)
                    below = levels[-1].copy()
                    below[:-half] = np.minimum(below[:-half], below[half:])
                    levels.append(below)
                table, power = np.stack(levels), log_of[sizes]
                best = np.minimum(table[power, first], table[power, ends_at + 1 - (1 << power)]) - done
            at = offset[node]
            value[at + good] = np.minimum(value[at + good], best)
        if pruning.active:
            own = value[offset[node] : offset[node] + high - low + 1]
            above = pruning.coarse[node]
            beyond = pruning.area.offset[above] - pruning.area.back[above] + low
            rest = np.asarray(pruning.rest[beyond : beyond + len(own)])
            own[own + rest > pruning.cutoff + pruning.credit[node]] = np.inf
            kept = np.flatnonzero(own + rest <= pruning.cutoff + pruning.credit[node])
            if len(kept):
                back[node], front[node] = low + int(kept[0]), low + int(kept[-1])
                offset[node] += int(kept[0])
            else:
                front[node] = -1


def to_go(
    width: int,
    net: Any,
    costs: Any,
    memory: Any,
    limits: Any,
    area: Any,
    charge: Any,
    rest: Any,
    stack_at: Any,
    stack_value: Any,
) -> None:
    """Set rest, indexed like value and inf before, to a lower bound on Φ and charges in front of a state.

    Exact without recomputation and exposed communication, which are relaxed so that the starts a stage may have
    are a window that only moves: a monotone stack answers in O(1) per state and option.
    """
    start, before_of, time, memory_of, source, final = net
    work, row_of, replicas_of, _, _, _, _, cut = costs
    _, _, memory_near = memory
    _, near, replicas_at, _, _ = limits
    back, front, offset = area
    for node in range(len(source) - 1, -1, -1):
        low = back[node]
        high = front[node]
        if high < low:
            continue
        here = offset[node] - low
        if final[node] and low == 0:
            rest[here] = 0.0
        for option in range(start[node], start[node + 1]):
            before = before_of[option]
            key = time[option]
            replicas = replicas_of[key]
            row = key * width
            memory_row = memory_of[option] * width
            base = row_of[key]
            there = offset[before] - back[before]
            i = low
            bottom = 0
            top = 0
            for j in range(max(back[before], low + 1), front[before] + 1):
                while i < j and i <= high:
                    if replicas >= replicas_at[i] and rest[here + i] < np.inf:
                        cost = rest[here + i] - work[base + i]
                        while top > bottom and stack_value[top - 1] >= cost:
                            top -= 1
                        stack_at[top] = i
                        stack_value[top] = cost
                        top += 1
                    i += 1
                closest = max(near[row + j], memory_near[memory_row + j])
                while bottom < top and stack_at[bottom] < closest:
                    bottom += 1
                if bottom < top and replicas >= replicas_at[j]:
                    cost = stack_value[bottom] + work[base + j] + cut[j] + charge[key]
                    if cost < rest[there + j]:
                        rest[there + j] = cost
                if bottom == top and i > high:
                    break


def shrink(
    coarse: Any, coarse_area: Any, value: Any, rest: Any, cutoff: float, low: Any, high: Any, area: Any
) -> int:
    """Shrink each node's interval to where its coarse node has a plan with value + rest ≤ cutoff.

    low and high are room for one number per coarse node. Return the states left. Cost: O(coarse states + nodes).
    """
    back, front, offset = area
    coarse_back, coarse_front, coarse_offset = coarse_area
    for node in range(len(coarse_back)):
        low[node] = coarse_front[node] + 1
        high[node] = -1
        here = coarse_offset[node] - coarse_back[node]
        for i in range(coarse_back[node], coarse_front[node] + 1):
            if value[here + i] + rest[here + i] <= cutoff:
                high[node] = i
                low[node] = min(low[node], i)
    total = 0
    for node in range(len(back)):
        back[node] = max(back[node], low[coarse[node]])
        front[node] = min(front[node], high[coarse[node]])
        offset[node] = total
        if front[node] >= back[node]:
            total += front[node] - back[node] + 1
    return total


def trace(
    width: int,
    net: Any,
    costs: Any,
    memory: Any,
    limits: Any,
    area: Any,
    steady: float,
    exposed: bool,
    charge: Any,
    value: Any,
    path_key: Any,
    path_start: Any,
    reached: Any,
) -> int:
    """Follow the least value back; return how many stages it has, 0 if there is no plan.

    path_key and path_start get time key and first layer of the stages, first one first; reached gets the plan's
    value, B, Ω, and Φ without charges. Choices are not stored but found again by comparing the same sums bit by
    bit, which saves half the memory traffic.
    """
    start, before_of, time, memory_of, source, final = net
    work, row_of, replicas_of, rounds_of_key, step, rounds_of, link, cut = costs
    memory_far, _, _ = memory
    far, _, replicas_at, _, _ = limits
    back, front, offset = area
    node = -1
    reached[0] = np.inf
    reached[1] = 0.0
    reached[2] = 0.0
    reached[3] = 0.0
    for other in range(len(source)):
        if final[other] and back[other] == 0 and front[other] >= 0 and value[offset[other]] < reached[0]:
            reached[0] = value[offset[other]]
            node = other
    count = 0
    i = 0
    narrow = 0
    while node >= 0 and not source[node]:
        target = value[offset[node] + i - back[node]]
        found = False
        for option in range(start[node], start[node + 1]):
            before = before_of[option]
            key = time[option]
            replicas = replicas_of[key]
            row = key * width
            base = row_of[key]
            if replicas < replicas_at[i]:
                continue
            end = min(far[row + i], memory_far[memory_of[option] * width + i], front[before])
            for j in range(max(i + 1, back[before]), end + 1):
                busy = work[base + j] - work[base + i]
                if exposed:
                    busy += cut[j]
                busy *= rounds_of_key[key]
                cost = value[offset[before] + j - back[before]] + cut[j] + work[base + j] + charge[key]
                keeps = replicas >= replicas_at[j] and (busy <= steady or not exposed)
                if keeps and cost - work[base + i] == target:
                    found = True
                    path_key[count] = key
                    path_start[count] = i
                    count += 1
                    reached[1] = max(reached[1], busy, rounds_of[min(narrow, replicas)] * link[i])
                    reached[2] = max(reached[2], step[row + j] - step[row + i])
                    reached[3] += work[base + j] - work[base + i] + cut[j]
                    narrow = replicas
                    node = before
                    i = j
                    break
            if found:
                break
        assert found
    return count
