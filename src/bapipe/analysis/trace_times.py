"""Layer times from a trace of PyTorch's profiler, where the model's modules are annotated by their paths.

    with torch.profiler.record_function("blocks.0.mlp"):        around the forward of that module

A forward's time is that of its annotation, less that of annotations within. A backward's is found by the number
that autograd gives to a forward's operation and to its backward. On a GPU both are the kernels' own times, by the
correlation of a kernel with the call that launched it; else the host's.
"""

from __future__ import annotations

import bisect
import itertools
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bapipe.costs.fields import COST_FIELDS, CostTable
from bapipe.costs.profile import Profile, ProfiledLayer
from bapipe.errors import BaPipeError, FileFormatError
from bapipe.io.files import load_json

__all__ = ["TraceTimes", "profile_of_trace", "read_trace_times"]

_MICRO = 1e-6
_REPLACED = ("forward", "backward", "update")
"""fields that are the trace's, or stay"""
_CORRELATION, _SEQUENCE = "correlation", "Sequence number"
_LONGEST = 1e18
"""microseconds; profilers count them since the epoch, or since the machine's start"""
_BACKWARD = "autograd::engine::evaluate_function"


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceTimes:
    """What annotated modules took, per call of the model."""

    forward: Mapping[str, float]
    """seconds by the annotation's name"""
    backward: Mapping[str, float]
    calls: int
    """calls of the model in the trace"""
    device: bool
    """whether the times are those of kernels"""


@dataclass(slots=True)
class _Span:
    start: float
    end: float
    name: str
    own: float
    """microseconds less of spans within"""
    sequence: int | None = None


def read_trace_times(path: str, names: Sequence[str]) -> TraceTimes:
    """What the trace has of annotations with these names; others are ignored."""
    events = _events(path)
    wanted = frozenset(names)
    marks = [event for event in events if event.get("cat") == "user_annotation" and event["name"] in wanted]
    if not marks:
        raise BaPipeError(
            f"{path} has no annotations with names of the model's modules, such as '{names[0][:60]}'; put "
            "torch.profiler.record_function(path) around the forward of each and trace again"
        )
    spans = {thread: _nested(own) for thread, own in _by_thread(marks).items()}
    operations = _by_thread([event for event in events if event.get("cat") == "cpu_op"])
    owner = _owners(operations, spans)
    backwards = {
        thread: _NestedSpans([_span(event) for event in own if event["name"].startswith(_BACKWARD)])
        for thread, own in operations.items()
    }
    kernels = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    forward: dict[str, float] = defaultdict(float)
    backward: dict[str, float] = defaultdict(float)
    if kernels:
        launched = {
            event["args"][_CORRELATION]: event
            for event in events
            if event.get("cat") in ("cuda_runtime", "cuda_driver") and _CORRELATION in event.get("args", {})
        }
        for kernel in kernels:
            launch = launched.get(kernel.get("args", {}).get(_CORRELATION))
            if launch is None:
                continue
            thread = _thread(launch)
            under = backwards.get(thread, _NO_SPANS).around(launch["ts"])
            if under is not None:
                name = owner.get(under.sequence)
                if name is not None:
                    backward[name] += kernel["dur"]
                continue
            mark = spans.get(thread, _NO_SPANS).around(launch["ts"])
            if mark is not None:
                forward[mark.name] += kernel["dur"]
    else:
        for own in spans.values():
            for mark in own.spans:
                forward[mark.name] += mark.own
        for own in backwards.values():
            for item in own.spans:
                name = owner.get(item.sequence)
                if name is not None:
                    backward[name] += item.end - item.start
    counts = Counter(event["name"] for event in marks)
    calls = Counter(counts.values()).most_common(1)[0][0]
    return TraceTimes(
        forward={name: forward[name] * _MICRO / calls for name in counts},
        backward={name: backward[name] * _MICRO / calls for name in counts},
        calls=calls,
        device=bool(kernels),
    )


def profile_of_trace(
    profile: Profile, path: str, *, accelerator: str, microbatch: int
) -> tuple[Profile, TraceTimes]:
    """The profile with the trace's times as those of an accelerator type at one micro-batch size.

    Bytes do not depend on the accelerator: they are the profile's own at that size. An annotated module of several
    layers is shared among them in proportion to the times that the profile has.
    """
    if not any(layer.modules for layer in profile.layers):
        raise BaPipeError(
            f"the profile of {profile.model.name} does not say which modules its layers are; profile it again"
        )
    if not profile.accelerators:
        raise BaPipeError(f"the profile of {profile.model.name} has no accelerator's bytes; profile it again")
    known, base = next(iter(profile.accelerators.items()))
    if microbatch not in base.microbatches:
        sizes = ", ".join(map(str, base.microbatches))
        raise BaPipeError(
            f"the profile has bytes at micro-batches of {sizes}, not {microbatch}; trace one of these"
        )
    row = base.microbatches.index(microbatch)
    paths = dict.fromkeys(
        name for layer in profile.layers for path in layer.modules for name in _with_holders(path)
    )
    found = read_trace_times(path, list(paths))
    costs = profile.at(known, microbatch)
    forward = _dealt(found.forward, profile.layers, costs.forward.tolist())
    backward = _dealt(found.backward, profile.layers, costs.backward.tolist())
    missing = next((layer.name for layer, time in zip(profile.layers, forward, strict=True) if not time), None)
    if missing is not None:
        raise BaPipeError(
            f"{path} has no time for layer '{missing[:60]}'; annotate a module of it and trace again"
        )
    source = "kernels" if found.device else "host"
    bytes_ = {name: _bytes_of(base, name, row) for name in COST_FIELDS if name not in _REPLACED}
    table = replace(
        base,
        **bytes_,
        source="measured",
        description=f"{source} times of {found.calls} calls in a PyTorch trace; bytes as on {known}",
        microbatches=(microbatch,),
        forward=(tuple(forward),),
        backward=(tuple(backward),),
        not_fitting=(),
        step_overhead=None,
        spread=None,
    )
    return replace(profile, accelerators={**profile.accelerators, accelerator: table}), found


def _bytes_of(table: CostTable, name: str, row: int) -> Any:
    """A field of bytes at one size; times, which the trace replaces, are not known."""
    given, rule = getattr(table, name), COST_FIELDS[name]
    if given is None or rule.unit == "seconds":
        return None
    return given if rule.per == "layer" else (given[row],)


def _dealt(times: Mapping[str, float], layers: Sequence[ProfiledLayer], shares: Sequence[float]) -> list[float]:
    """Seconds of each layer: of an annotation, those layers' that have modules under its name."""
    found = [0.0] * len(layers)
    for name, seconds in times.items():
        own = [
            index
            for index, layer in enumerate(layers)
            if any(path == name or path.startswith(f"{name}.") for path in layer.modules)
        ]
        total = sum(shares[index] for index in own)
        for index in own:
            found[index] += seconds * (shares[index] / total if total else 1 / len(own))
    return found


def _with_holders(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts) + 1)] if path else []


def _events(path: str) -> list[dict[str, Any]]:
    data = load_json(path)
    events = data.get("traceEvents") if isinstance(data, dict) else data
    if not isinstance(events, list):
        raise FileFormatError(f"{path} has no traceEvents; give what torch.profiler's export_chrome_trace wrote")
    found = [event for event in events if isinstance(event, dict) and _complete(event)]
    for event in found:
        if not (0 <= event["dur"] < _LONGEST and abs(event["ts"]) < _LONGEST):
            begins, lasts = (str(event[key])[:30] for key in ("ts", "dur"))
            raise FileFormatError(
                f"{path}: '{event['name'][:60]}' begins at {begins} and lasts {lasts} microseconds, which no "
                "profiler writes; trace again"
            )
    return found


def _complete(event: dict[str, Any]) -> bool:
    """Whether it is an event with a duration, and has what is read of it."""
    return (
        event.get("ph") == "X"
        and all(_is_number(event.get(key)) for key in ("ts", "dur"))
        and isinstance(event.get("name"), str)
        and isinstance(event.get("args", {}), dict)
        and all(_is_number(event.get("args", {}).get(key, 0)) for key in (_CORRELATION, _SEQUENCE))
    )


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _thread(event: Mapping[str, Any]) -> tuple[str, str]:
    return str(event.get("pid")), str(event.get("tid"))


def _by_thread(events: Sequence[dict[str, Any]]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for event in events:
        found.setdefault(_thread(event), []).append(event)
    return found


def _span(event: Mapping[str, Any]) -> _Span:
    sequence = event.get("args", {}).get(_SEQUENCE)
    return _Span(event["ts"], event["ts"] + event["dur"], event["name"], event["dur"], sequence)


def _nested(events: Sequence[dict[str, Any]]) -> _NestedSpans:
    """The spans, each with its own time."""
    found = _NestedSpans([_span(event) for event in events])
    open_: list[_Span] = []
    for span in found.spans:
        while open_ and open_[-1].end <= span.start:
            open_.pop()
        if open_:
            open_[-1].own -= min(span.end, open_[-1].end) - span.start
        open_.append(span)
    return found


class _NestedSpans:
    """Spans of one thread, which nest, by start."""

    def __init__(self, spans: Sequence[_Span]) -> None:
        self.spans = sorted(spans, key=lambda span: (span.start, -span.end))
        self.starts = [span.start for span in self.spans]
        self.last = list(itertools.accumulate((span.end for span in self.spans), max))
        """the latest end up to each"""

    def around(self, time: float) -> _Span | None:
        """The innermost span around a time."""
        place = bisect.bisect_right(self.starts, time) - 1
        while place >= 0 and self.last[place] >= time:
            if self.spans[place].end >= time:
                return self.spans[place]
            place -= 1
        return None


_NO_SPANS = _NestedSpans(())


def _owners(
    operations: Mapping[tuple[str, str], Sequence[dict[str, Any]]], spans: Mapping[tuple[str, str], _NestedSpans]
) -> dict[int | None, str]:
    """The annotation that made each sequence number of autograd."""
    found: dict[int | None, str] = {}
    for thread, own in operations.items():
        for event in own:
            number = event.get("args", {}).get(_SEQUENCE)
            if number is None or event["name"].startswith(_BACKWARD) or event["args"].get("Fwd thread id"):
                continue
            mark = spans.get(thread, _NO_SPANS).around(event["ts"])
            if mark is not None:
                found[number] = mark.name
    return found
