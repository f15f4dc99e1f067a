"""Nothing private of torch outside one file, and what that file needs is where it was."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import bapipe.torch.compiling
from bapipe.errors import BaPipeError
from bapipe.torch.compiling import inductor_internals
from bapipe.torch.compiling.inductor_internals import BackwardGraph, check_compiler, lower
from private_names import private_names

FOLDER = Path(bapipe.torch.compiling.__file__).parent


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.py")), ids=lambda file: file.name)
def test_private_names_are_in_one_file(file: Path) -> None:
    if file.name == "inductor_internals.py":
        assert private_names(file)
    else:
        assert private_names(file) == []


def both(weight: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    return (value @ weight).sigmoid(), weight * 2


def test_what_is_asked_of_the_tracer_and_the_partitioner() -> None:
    examples = [torch.randn(3, 3, requires_grad=True), torch.randn(2, 3)]
    found: list[BackwardGraph] = []
    lowered = lower(both, examples, results=2, on_backward=found.append, backend="graph")
    (graph,) = found
    assert graph.tangents == 2
    assert [tuple(item.shape) for item in lowered.tangents] == [(2, 3), (3, 3)]
    made = list(lowered.forward([item.detach() for item in examples]))
    torch.testing.assert_close(made[:2], list(both(*examples)))
    saved = made[lowered.results :]
    assert len(saved) == len(graph.examples) - graph.tangents
    run = graph.compile(graph.module, graph.examples)
    gradients = run([*saved, torch.ones(2, 3), torch.ones(3, 3)])
    wanted = torch.autograd.grad([item.sum() for item in both(*examples)], examples[0])
    torch.testing.assert_close(gradients[0], wanted[0])
    assert gradients[1] is None
    inputs = [node.name for node in graph.module.graph.nodes if node.op == "placeholder"]
    assert inputs[-2:] == ["tangents_1", "tangents_2"], "gradients of outputs are recognised by their names"


def test_a_function_that_writes_its_input_is_refused() -> None:
    def writes(weight: Tensor, value: Tensor) -> tuple[Tensor]:
        value.add_(1)
        return (value @ weight,)

    with pytest.raises(BaPipeError, match="changes its inputs"):
        lower(
            writes,
            [torch.randn(3, 3, requires_grad=True), torch.randn(2, 3)],
            results=1,
            on_backward=lambda _: None,
            backend="graph",
        )


def test_a_machine_without_compilers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inductor_internals.shutil, "which", lambda _: None)
    with pytest.raises(BaPipeError, match=r"needs a C\+\+ compiler for a CPU and found none; install"):
        check_compiler(torch.device("cpu"))
    with pytest.raises(BaPipeError, match=r"needs (triton|a C compiler)"):
        check_compiler(torch.device("cuda"))
