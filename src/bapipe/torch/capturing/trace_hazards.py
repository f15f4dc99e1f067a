"""What torch.export gets wrong without saying so: seen while it traces, with the module it happened in.

A custom `autograd.Function` is traced through and its backward lost; activation checkpointing is inlined; a random
number of Python or numpy is drawn once and frozen. Each is found here, by name of module, so that the module can
be kept whole (see `opaque`).
"""

from __future__ import annotations

import contextlib
import functools
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from bapipe.torch.capturing.torch_internals import function_classes

__all__ = [
    "Finding",
    "Hazard",
    "LayerdropOff",
    "blame",
    "called_module",
    "frames_of",
    "locate_randomness",
    "random_state",
    "unwatched",
    "watching",
    "whole_call",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A module that cannot be traced and is kept whole."""

    path: str
    reason: str
    checkpoint: tuple[tuple[str, Any], ...] | None = None
    """how its caller checkpoints it, as arguments of `torch.utils.checkpoint.checkpoint`"""


class Hazard(BaseException):
    """Raised from within a forward that does what export would get wrong; no `except Exception` stops it."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


_off = 0


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """Let hazards pass: what runs here is a whole module, not a trace."""
    global _off
    _off += 1
    try:
        yield
    finally:
        _off -= 1


@contextlib.contextmanager
def watching(is_whole: Callable[[FrameType | None], bool]) -> Iterator[None]:
    """Raise `Hazard` where a custom function or a saved-tensor hook runs, unless `is_whole(frame)` allows it."""
    patched: list[tuple[type[Any], Any]] = []
    hooks = torch.autograd.graph.saved_tensors_hooks
    enter = hooks.__enter__

    def guarded(cls: type[Any], forward: Any) -> Any:
        function = forward.__func__ if isinstance(forward, staticmethod) else forward
        is_checkpoint = cls.__module__ == "torch.utils.checkpoint"

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            if _off:
                return function(*args, **kwargs)
            if is_checkpoint and is_whole(sys._getframe(1)):
                _ctx, checkpointed, _preserve, *inputs = args
                return checkpointed(*inputs)  # its no_grad region would hide the whole module
            raise Hazard("activation checkpointing" if is_checkpoint else f"autograd.Function {cls.__name__}")

        return staticmethod(run)

    def guarded_enter(self: Any) -> Any:
        if not _off and not is_whole(sys._getframe(1)):
            inside = any(_is_checkpoint(frame) for frame in _outwards(sys._getframe(1)))
            raise Hazard("activation checkpointing" if inside else "saved-tensor hooks")
        return enter(self)

    for cls in function_classes():
        patched.append((cls, vars(cls)["forward"]))
        cls.forward = guarded(cls, vars(cls)["forward"])
    hooks.__enter__ = guarded_enter  # type: ignore[method-assign]
    try:
        yield
    finally:
        hooks.__enter__ = enter  # type: ignore[method-assign]
        for cls, forward in patched:
            cls.forward = forward


class LayerdropOff(TorchFunctionMode):
    """Answers `torch.rand([])` with 1, so that layer drop (OPT, BART, Whisper) keeps every layer."""

    def __init__(self) -> None:
        super().__init__()
        self.draws = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.rand and args and args[0] in ([], ()) and isinstance(args[0], (list, tuple)):
            self.draws += 1
            return 1.0
        return func(*args, **(kwargs or {}))


def random_state() -> tuple[Any, ...]:
    """State of the generators of Python and, if imported, numpy."""
    numpy = sys.modules.get("numpy")
    state: tuple[Any, ...] = ()
    if numpy is not None:
        name, keys, *rest = numpy.random.get_state()
        state = (name, keys.tobytes(), *rest)
    return (random.getstate(), state)


@contextlib.contextmanager
def locate_randomness(module: nn.Module) -> Iterator[list[str]]:
    """Collect the paths of the innermost modules in whose forward Python or numpy draws a number."""
    paths = {id(item): path for path, item in module.named_modules()}
    found: list[str] = []
    stack: list[tuple[tuple[Any, ...], int]] = []

    def before(item: nn.Module, _: Any) -> None:
        if id(item) in paths:
            stack.append((random_state(), len(found)))

    def after(item: nn.Module, _args: Any, _output: Any) -> None:
        if id(item) in paths and stack:
            state, known = stack.pop()
            if len(found) == known and random_state() != state:
                found.append(paths[id(item)])

    handles = [
        nn.modules.module.register_module_forward_pre_hook(before),
        nn.modules.module.register_module_forward_hook(after),
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_checkpoint(frame: FrameType) -> bool:
    return frame.f_code.co_name == "checkpoint" and frame.f_globals.get("__name__") == "torch.utils.checkpoint"


def frames_of(error: BaseException) -> list[FrameType]:
    """Frames of the error and its causes, outermost first."""
    frames: list[FrameType] = []
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        trace: TracebackType | None = current.__traceback__
        own = []
        while trace is not None:
            own.append(trace.tb_frame)
            trace = trace.tb_next
        frames = own if len(own) > len(frames) else frames
        current = current.__cause__ or current.__context__
    return frames


def blame(module: nn.Module, error: BaseException, reason: str) -> Finding:
    """The innermost module that was running when the error came; of a checkpointed call, the one called."""
    paths = {id(item): path for path, item in module.named_modules()}
    path = ""
    checkpoint: tuple[tuple[str, Any], ...] | None = None
    for frame in frames_of(error):
        if _is_checkpoint(frame):
            called = called_module(frame)
            if called is not None and id(called) in paths and reason == "activation checkpointing":
                own = paths[id(called)]
                # A module that checkpoints itself (transformers) is restored by calling it.
                if own != path:
                    path, checkpoint = own, _options(frame)
                break
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and id(owner) in paths:
            path = paths[id(owner)]
    return Finding(path=path, reason=reason, checkpoint=checkpoint)


def called_module(frame: FrameType) -> nn.Module | None:
    """Of a frame of `checkpoint`, the module that it is to run."""
    function = frame.f_locals.get("function")
    while isinstance(function, functools.partial):
        function = function.func
    owner = getattr(function, "__self__", function)
    return owner if isinstance(owner, nn.Module) else None


def _options(frame: FrameType) -> tuple[tuple[str, Any], ...]:
    known = ("use_reentrant", "preserve_rng_state", "context_fn", "determinism_check")
    options = {key: frame.f_locals[key] for key in known if frame.f_locals.get(key) is not None}
    if options.get("use_reentrant"):
        options = {"use_reentrant": True}
    options.setdefault("use_reentrant", False)
    return tuple(options.items())


def whole_call(frame: FrameType | None, whole: Callable[[nn.Module], bool]) -> bool:
    """Whether the frame lies in a checkpointed call of a module that is kept whole anyway."""
    for item in _outwards(frame):
        if _is_checkpoint(item):
            called = called_module(item)
            return called is not None and whole(called)
        owner = item.f_locals.get("self")
        if isinstance(owner, nn.Module) and whole(owner):
            return True
    return False
