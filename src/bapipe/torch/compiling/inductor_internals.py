"""All that compiling uses of torch's private parts, in one place: a test fails when something here moves.

Written against torch 2.11 and 2.13. Nothing else under `bapipe.torch.compiling` may touch a name of torch that
begins with an underscore.
"""

from __future__ import annotations

import importlib.util
import operator
import os
import shutil
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, fx

from bapipe.errors import BaPipeError

__all__ = ["Backend", "BackwardGraph", "Boxed", "CompiledJoint", "check_compiler", "lower"]

Backend = Literal["inductor", "graph"]
"""inductor makes kernels; graph runs the same graphs operation by operation, for tests"""
Boxed = Callable[[list[Any]], Sequence[Any]]
"""takes its inputs in a list, which it empties, so that each is freed after its last use"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BackwardGraph:
    """The graph of a backward before it is compiled, with propagated shapes, and how to compile a part of it."""

    module: fx.GraphModule
    """takes the saved values, then the gradients of outputs; returns one gradient per input of the forward"""
    examples: tuple[Any, ...]
    """one per input, without memory"""
    tangents: int
    """how many of the inputs, the last ones, are gradients of outputs"""
    compile: Callable[[fx.GraphModule, Sequence[Any]], Boxed]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CompiledJoint:
    """A function, traced with its backward and compiled."""

    forward: Boxed
    """returns the outputs, then the values that are saved for the backward"""
    results: int
    """how many of these are outputs"""
    backward: Any
    """what `on_backward` made of the backward's graph; None: nothing requires a gradient"""
    tangents: tuple[Any, ...]
    """examples of the gradients that the backward takes, without memory"""


def lower(
    function: Callable[..., tuple[Tensor, ...]],
    examples: Sequence[Tensor],
    *,
    results: int,
    on_backward: Callable[[BackwardGraph], Any],
    backend: Backend = "inductor",
) -> CompiledJoint:
    """Trace a function without side effects with its backward, partition both and compile the forward.

    Shapes, strides, dtypes and which inputs require a gradient are those of the examples; autocast is as it is.
    The partition is torch.compile's: what is cheap to compute again is not saved. `on_backward` is given the
    backward's graph, while what compiling needs is in place.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch about itself
        return _lower(function, examples, results, on_backward, backend)


def _lower(
    function: Callable[..., tuple[Tensor, ...]],
    examples: Sequence[Tensor],
    results: int,
    on_backward: Callable[[BackwardGraph], Any],
    backend: Backend,
) -> CompiledJoint:
    from torch._functorch import config as functorch_config
    from torch._inductor import config as inductor_config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    found: dict[str, Any] = {}

    def compile_graph(module: fx.GraphModule, inputs: Sequence[Any], options: dict[str, Any]) -> Any:
        if backend == "graph":
            return _interpreted(module)
        return compile_fx_inner(module, inputs, **options)

    def compile_either(module: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        if not options.get("is_backward"):
            if any(_writes_input(node) for node in module.graph.nodes):
                raise BaPipeError("it changes its inputs")
            found["outputs"] = len(_outputs(module))
            found["forward"] = compile_graph(module, inputs, options)
            return found["forward"]
        tangents = sum(
            node.op == "placeholder" and node.name.startswith("tangents") for node in module.graph.nodes
        )
        _propagate(module, inputs)
        options["static_input_idxs"] = ()
        graph = BackwardGraph(
            module=module,
            examples=tuple(inputs),
            tangents=tangents,
            compile=lambda part, given: compile_graph(part, given, options),
        )
        found["backward"] = on_backward(graph)
        found["saved"] = len(inputs) - tangents
        found["tangents"] = tuple(inputs[len(inputs) - tangents :])
        return _boxed(lambda _: [])

    settings = {
        "donated_buffer": False,  # what a backward may overwrite could be held for the second part of it
        "enable_autograd_cache": False,  # it would hide the backward's graph; graphs are cached one by one
        "force_non_lazy_backward_lowering": True,  # not at the first backward
    }
    with functorch_config.patch(settings), inductor_config.patch(fallback_random=True):
        compile_fx(_call(function, len(examples), results), list(examples), inner_compile=compile_either)
    saved = found.get("saved", 0)
    if found["outputs"] - saved != results:
        raise BaPipeError("its outputs share memory")
    return CompiledJoint(
        forward=_unboxed(found["forward"]),
        results=results,
        backward=found.get("backward"),
        tangents=found.get("tangents", ()),
    )


def _call(function: Callable[..., Any], inputs: int, outputs: int) -> fx.GraphModule:
    """A graph that calls the function, as the tracer wants it."""
    graph = fx.Graph()
    given = tuple(graph.placeholder(f"value_{index}") for index in range(inputs))
    made = graph.call_function(function, given)
    graph.output(tuple(graph.call_function(operator.getitem, (made, index)) for index in range(outputs)))
    return fx.GraphModule(torch.nn.Module(), graph)


def _outputs(module: fx.GraphModule) -> Sequence[Any]:
    (found,) = (node for node in module.graph.nodes if node.op == "output")
    results: Any = found.args[0]
    return list(results)


def _writes_input(node: fx.Node) -> bool:
    if node.target is not torch.ops.aten.copy_.default:
        return False
    target: Any = node.args[0]
    return bool(target.op == "placeholder")


def _propagate(module: fx.GraphModule, inputs: Sequence[Any]) -> None:
    """Shapes and strides of every node, as these inputs give them."""
    from torch._guards import detect_fake_mode
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    FakeTensorProp(module, mode=detect_fake_mode(list(inputs))).propagate_dont_convert_inputs(*inputs)


def _interpreted(module: fx.GraphModule) -> Any:
    return _boxed(lambda given: fx.Interpreter(module).boxed_run(given))


def _boxed(function: Callable[[list[Any]], Any]) -> Any:
    def run(given: list[Any]) -> Any:
        return function(given)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _unboxed(compiled: Any) -> Boxed:
    """A compiled graph that takes a list, whatever it was made to take."""
    if getattr(compiled, "_boxed_call", False):
        found: Boxed = compiled
        return found
    return lambda given: compiled(*given)


def check_compiler(device: torch.device) -> None:
    """Refuse a machine that cannot compile for the device: BaPipeError with what it lacks. Loads no compiler."""
    if device.type == "cuda":
        if importlib.util.find_spec("triton") is None:
            raise BaPipeError(
                "--compile needs triton for a GPU, which is not installed; install it, or run without"
            )
        if not any(shutil.which(name) for name in (os.environ.get("CC") or "cc", "gcc", "clang")):
            raise BaPipeError(
                "--compile needs a C compiler for triton and found none; install gcc, or run without"
            )
        return
    if not any(shutil.which(name) for name in (os.environ.get("CXX") or "g++", "g++")):
        raise BaPipeError(
            "--compile needs a C++ compiler for a CPU and found none; install g++, set CXX, or run without"
        )
