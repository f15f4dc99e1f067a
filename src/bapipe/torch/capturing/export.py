"""torch.export of a module in training mode, with what it cannot trace kept whole."""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import linecache
import logging
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, ShapesCollection

from bapipe.errors import BaPipeError, first_line
from bapipe.torch.capturing.causal_masks import masks_as_in_eager
from bapipe.torch.capturing.leaf_modules import (
    OPAQUE_OP,
    OpaqueCall,
    Recorded,
    call_of,
    leaves_traced_whole,
    record_outputs,
)
from bapipe.torch.capturing.module_state import generators, hollowed, on_meta, preserved
from bapipe.torch.capturing.torch_internals import (
    flatten,
    is_symbolic,
    lstms_traced_whole,
    op_name,
    placeholders,
    register_dataclasses,
    unflatten,
)
from bapipe.torch.capturing.trace_hazards import (
    Finding,
    Hazard,
    LayerdropOff,
    blame,
    frames_of,
    locate_randomness,
    random_state,
    watching,
    whole_call,
)

__all__ = ["Examples", "Exported", "error_words", "examples_of", "export_module"]

_ATTEMPTS = 24
_Reason = tuple[str, BaseException]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Examples:
    """Example inputs, taken apart."""

    leaves: tuple[Any, ...]
    spec: Any
    batch: int
    """samples: the first dimension of the first tensor"""
    batched: tuple[bool, ...]
    """per leaf, whether it is a tensor whose first dimension counts samples"""
    keywords: tuple[str, ...]
    """names of the keyword arguments, in order"""

    def tree(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """(args, kwargs) with tensors of their own."""
        leaves = [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        for leaf, given in zip(leaves, self.leaves, strict=True):
            if isinstance(given, Tensor) and given.requires_grad:
                leaf.requires_grad_()
        args, kwargs = unflatten(leaves, self.spec)
        return args, kwargs

    def on(self, device: torch.device) -> Examples:
        """The same with its tensors on another device."""
        moved = (
            leaf.detach().to(device).requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf
            for leaf in self.leaves
        )
        return replace(self, leaves=tuple(moved))

    @property
    def length(self) -> int | None:
        """Positions of a sequence: the second dimension of the first tensor that has one and counts samples."""
        sized = (leaf for leaf, batched in zip(self.leaves, self.batched, strict=True) if batched)
        return next((int(leaf.shape[1]) for leaf in sized if leaf.ndim > 1), None)

    @property
    def positions(self) -> tuple[tuple[int, ...], ...]:
        """Per leaf, the dimensions that count positions: those as large as `length`, but not that of samples."""
        found = []
        for leaf, batched in zip(self.leaves, self.batched, strict=True):
            dims = range(int(batched), leaf.ndim) if isinstance(leaf, Tensor) else ()
            found.append(tuple(dim for dim in dims if leaf.shape[dim] == self.length))
        return tuple(found)

    def of_length(self, length: int) -> Examples:
        """The same with sequences of so many positions: the first ones, or all over again."""
        leaves = list(self.leaves)
        for index, dims in enumerate(self.positions):
            for dim in dims:
                leaf = leaves[index].detach()
                chosen = torch.arange(length, device=leaf.device) % leaf.shape[dim]
                leaves[index] = leaf.index_select(dim, chosen).requires_grad_(leaves[index].requires_grad)
        return replace(self, leaves=tuple(leaves))

    def resized(self, batch: int) -> Examples:
        """The same with so many samples: the first ones, or all over again."""
        leaves = list(self.leaves)
        for index, batched in enumerate(self.batched):
            if batched:
                times = -(-batch // self.batch)
                whole = torch.cat([leaves[index].detach()] * times)[:batch]
                leaves[index] = whole.requires_grad_(leaves[index].requires_grad)
        return replace(self, leaves=tuple(leaves), batch=batch)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Exported:
    """A traced module and what was found on the way."""

    program: ExportedProgram
    examples: Examples
    dynamic: bool
    """whether the number of samples is free"""
    findings: tuple[Finding, ...]
    calls: dict[str, OpaqueCall]
    """by the key of the traced node"""
    layerdrop_draws: int
    left_out: tuple[str, ...]
    """types among the model's outputs that were replaced by None"""


def examples_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Examples:
    """Take example inputs apart and find which dimension counts samples."""
    register_dataclasses((args, kwargs))
    leaves, spec = flatten((tuple(args), dict(kwargs)))
    sizes = [leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim]
    if not sizes:
        raise BaPipeError("the example inputs hold no tensor with a dimension; give args or kwargs that do")
    batch = int(sizes[0])
    if batch < 1:
        raise BaPipeError("the first example input has no samples; give at least one")
    batched = tuple(isinstance(leaf, Tensor) and leaf.ndim > 0 and leaf.shape[0] == batch for leaf in leaves)
    return Examples(leaves=tuple(leaves), spec=spec, batch=batch, batched=batched, keywords=tuple(kwargs))


def export_module(module: nn.Module, examples: Examples, *, dynamic: bool) -> Exported:
    """Trace the module, again with one more module kept whole for each that cannot be traced.

    Raises BaPipeError naming operation and module if the root itself is at fault. The module is left as it was.
    """
    if dynamic and examples.batch == 1:
        examples = examples.resized(2)  # export takes a size of 1 for a constant
    findings: list[Finding] = []
    recorded: dict[str, list[Recorded]] = {}
    for _ in range(_ATTEMPTS):
        found = _attempt(module, examples, dynamic, findings, recorded)
        if isinstance(found, Exported):
            return found
        reason, error = found
        finding = blame(module, error, reason)
        known = {item.path for item in findings}
        while finding.path and (finding.path in known or _is_container(module, finding.path)):
            finding = Finding(path=finding.path.rpartition(".")[0], reason=reason)
        if not finding.path:
            _require_eager(module, examples)
            raise _refusal(module, findings, reason, error)
        findings = [item for item in findings if not item.path.startswith(f"{finding.path}.")]
        findings.append(finding)
        if not on_meta(module):
            _require_eager(module, examples)
            recorded = _record(module, examples, [item.path for item in findings])
    raise _refusal(module, findings, reason, error)


def _attempt(
    module: nn.Module,
    examples: Examples,
    dynamic: bool,
    findings: list[Finding],
    recorded: dict[str, list[Recorded]],
) -> Exported | _Reason:
    for free in (True, False) if dynamic else (False,):
        try:
            return _export(module, examples, free, findings, recorded)
        except Hazard as hazard:
            return hazard.reason, hazard
        except _RandomnessError as error:
            return "randomness of Python or numpy", error
        except Exception as error:
            failure: _Reason = (error_words(error), error)
    return failure


class _RandomnessError(Exception):
    """Python or numpy drew a number; its frames hold the module as `self`."""


def _export(
    module: nn.Module,
    examples: Examples,
    dynamic: bool,
    findings: list[Finding],
    recorded: dict[str, list[Recorded]],
) -> Exported:
    whole = {id(module.get_submodule(item.path)) for item in findings}
    args, kwargs = examples.tree()
    shapes = ShapesCollection()  # type: ignore[no-untyped-call]
    if dynamic:
        for leaf, batched in zip(flatten((args, kwargs))[0], examples.batched, strict=True):
            if batched:
                shapes[leaf] = {0: Dim.AUTO}
    free: Any = shapes if dynamic else None
    layerdrop = LayerdropOff()
    with (
        generators(),
        hollowed(module),
        _plain_outputs(module, examples.keywords) as left_out,
        leaves_traced_whole(module, findings, recorded),
        watching(lambda frame: whole_call(frame, lambda item: id(item) in whole)),
        _quiet(),
        lstms_traced_whole(),
        masks_as_in_eager(module),
        layerdrop,
    ):
        before = random_state()
        program = torch.export.export(module, args, kwargs, dynamic_shapes=free, strict=False)
        if random_state() != before:
            with locate_randomness(module) as paths:
                torch.export.export(module, args, kwargs, dynamic_shapes=free, strict=False)
            guilty = [path for path in paths if id(module.get_submodule(path)) not in whole]
            if guilty:
                _raise_randomness(module.get_submodule(guilty[0]))
        calls = {
            str(node.args[1]): call_of(str(node.args[1]))
            for node in program.graph.nodes
            if node.op == "call_function" and op_name(node.target) == OPAQUE_OP
        }
    inputs = [item.node for item in placeholders(program) if item.kind == "input"]
    pairs = list(zip(inputs, examples.batched, strict=True))
    moves = tuple(batched and is_symbolic(node.meta["val"].shape[0]) for node, batched in pairs)
    is_free = dynamic and moves[examples.batched.index(True)]
    return Exported(
        program=program,
        # A first dimension that only happens to be as large as the batch is fixed by the trace.
        examples=replace(examples, batched=moves) if is_free else examples,
        dynamic=is_free,
        findings=tuple(findings),
        calls=calls,
        layerdrop_draws=layerdrop.draws,
        left_out=tuple(left_out),
    )


def _is_plain(leaf: Any) -> bool:
    return leaf is None or isinstance(leaf, (Tensor, int, float, bool, str, torch.SymInt, torch.SymFloat))


def _raise_randomness(self: nn.Module) -> None:
    raise _RandomnessError(type(self).__name__)


@contextlib.contextmanager
def _plain_outputs(module: nn.Module, keywords: Sequence[str]) -> Iterator[list[str]]:
    """Make pytree nodes of the dataclasses that the module returns, and None of what can be no output (a cache).

    The forward names the keyword arguments that it is called with: torch.export loses free dimensions where a
    constant such as return_dict=True arrives through **kwargs. Yields the names of the types that were left out.
    """
    left_out: list[str] = []
    own = vars(module).get("forward")
    forward = module.forward

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        register_dataclasses(output)
        leaves, spec = flatten(output)
        left_out.extend(type(leaf).__name__ for leaf in leaves if not _is_plain(leaf))
        return unflatten([leaf if _is_plain(leaf) else None for leaf in leaves], spec)

    run.__signature__ = _naming(inspect.signature(forward), keywords)  # type: ignore[attr-defined]
    module.forward = run
    try:
        yield left_out
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own


def _naming(signature: inspect.Signature, keywords: Sequence[str]) -> inspect.Signature:
    """The signature with what its **kwargs is given among `keywords` as parameters of their own."""
    own = [item for item in signature.parameters.values() if item.kind is not inspect.Parameter.VAR_KEYWORD]
    if len(own) == len(signature.parameters):
        return signature
    named = {item.name for item in own}
    added = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in keywords if name not in named]
    return signature.replace(parameters=[*own, *added])


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence what torch says of its own doings while it traces; errors are reported in our words."""
    loggers = [
        logging.getLogger(f"torch.{name}") for name in ("fx.experimental.symbolic_shapes", "export", "_export")
    ]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with _without_warnings(), contextlib.redirect_stderr(io.StringIO()):  # export prints graphs that fail
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The tensor attributes? .* (was|were) assigned during export")
        warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
        warnings.filterwarnings("ignore", category=DeprecationWarning, module="torch")
        yield


def _record(module: nn.Module, examples: Examples, paths: list[str]) -> dict[str, list[Recorded]]:
    double = examples.resized(2 * examples.batch)
    runs = []
    for example in (examples, double):
        args, kwargs = example.tree()
        runs.append(functools.partial(module, *args, **kwargs))
    with preserved(module), LayerdropOff():
        return record_outputs(module, paths, runs, (examples.batch, double.batch))


def _require_eager(module: nn.Module, examples: Examples) -> None:
    """Refuse a model that fails by itself: then it is not the trace that is at fault."""
    if on_meta(module):
        return
    args, kwargs = examples.tree()
    try:
        with preserved(module), LayerdropOff():
            module(*args, **kwargs)
    except Exception as error:
        where = blame(module, error, "").path
        raise BaPipeError(
            f"{type(module).__name__} fails on its own example: {error_words(error)}"
            f"{f', in module {where!r}' if where else ''}{_user_line(error)}; "
            "correct the model or the example inputs"
        ) from error


def _is_container(module: nn.Module, path: str) -> bool:
    return isinstance(module.get_submodule(path), (nn.ModuleList, nn.ModuleDict))


def error_words(error: BaseException) -> str:
    """The type of an error and the first line of its text."""
    text = first_line(error)
    return text if text == type(error).__name__ else f"{type(error).__name__}: {text}"


def _refusal(module: nn.Module, findings: list[Finding], reason: str, error: BaseException) -> BaPipeError:
    place = blame(module, error, reason).path
    where = f"module '{place}' ({type(module.get_submodule(place)).__name__})" if place else type(module).__name__
    line = _user_line(error)
    also = f"; leaf modules so far: {', '.join(item.path for item in findings)}" if findings else ""
    problem = BaPipeError(
        f"{type(module).__name__} cannot be traced: {reason}, in the forward of {where}{line}{also}; "
        "move that operation into a submodule of its own, which is then kept as a leaf module, or replace it"
    )
    problem.__cause__ = error if isinstance(error, Exception) else None
    return problem


def _user_line(error: BaseException) -> str:
    """The innermost line of code that is not torch's."""
    for frame in reversed(frames_of(error)):
        name = str(frame.f_globals.get("__name__", ""))
        if name.split(".")[0] in ("torch", "bapipe", "contextlib", "functools"):
            continue
        file, number = frame.f_code.co_filename, frame.f_lineno
        text = linecache.getline(file, number).strip()
        return f", {file.rpartition('/')[2]}:{number}{f' `{text[:100]}`' if text else ''}"
    return ""
