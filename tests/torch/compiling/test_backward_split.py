"""A backward's graph in two parts: what each computes, and what is held in between."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from bapipe.torch.capturing.torch_internals import op_name
from bapipe.torch.compiling.backward_split import SplitGraphs, split_backward_graph
from bapipe.torch.compiling.inductor_internals import BackwardGraph, lower


def split_of(function: object, examples: list[Tensor], weights: int) -> tuple[SplitGraphs, BackwardGraph]:
    """The backward of a function of weights, then values, split."""
    found: list[BackwardGraph] = []
    lower(function, examples, results=1, on_backward=found.append, backend="graph")  # type: ignore[arg-type]
    (graph,) = found
    resident = {f"primals_{index + 1}" for index in range(weights)}
    return split_backward_graph(graph.module, graph.examples, weights=weights, resident=resident), graph


def operations(module: fx.GraphModule | None) -> list[str]:
    assert module is not None
    return [op_name(node.target) for node in module.graph.nodes if node.op == "call_function"]


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def test_products_for_weights_wait_and_what_is_cheap_does_not() -> None:
    def layer(first: Tensor, bias: Tensor, second: Tensor, value: Tensor) -> tuple[Tensor]:
        return (torch.nn.functional.gelu(value @ first.t() + bias) @ second.t(),)

    split, _ = split_of(layer, [leaf(6, 4), leaf(6), leaf(4, 6), leaf(5, 4)], 3)
    assert split.deferred == (0, 2)
    assert split.at_once == (1, 3)
    assert operations(split.input_graph).count("aten.mm") == 2
    assert operations(split.weight_graph).count("aten.mm") == 2


def test_a_cast_is_made_again_from_what_is_smaller() -> None:
    def layer(weight: Tensor, value: Tensor) -> tuple[Tensor]:
        normed = torch.nn.functional.rms_norm(value.float(), (8,)).to(torch.bfloat16)
        return (normed @ weight.t(),)

    examples = [leaf(8, 8).to(torch.bfloat16), leaf(5, 8).to(torch.bfloat16)]
    split, _ = split_of(layer, [item.detach().requires_grad_() for item in examples], 1)
    held = split.weight_examples
    assert all(item.dtype == torch.bfloat16 or item.numel() <= 5 for item in held)
    assert sum(item.numel() * item.element_size() for item in held) <= 2 * 5 * 8 * 2 + 5 * 4


def test_a_layer_whose_input_has_no_gradient_defers_all_of_it() -> None:
    def layer(table: Tensor, tokens: Tensor) -> tuple[Tensor]:
        return (torch.nn.functional.embedding(tokens, table),)

    split, _ = split_of(layer, [leaf(7, 3), torch.randint(7, (4,))], 1)
    assert split.input_graph is None
    assert split.deferred == (0,)
    assert split.weight_graph is not None


def test_a_convolution_is_differentiated_in_two_operations() -> None:
    def layer(weight: Tensor, bias: Tensor, value: Tensor) -> tuple[Tensor]:
        return (torch.nn.functional.conv2d(value, weight, bias).relu(),)

    split, graph = split_of(layer, [leaf(4, 3, 3, 3), leaf(4), leaf(2, 3, 6, 6)], 2)
    assert operations(graph.module).count("aten.convolution_backward") == 1, "the graph itself is left as it was"
    for part in (split.input_graph, split.weight_graph):
        assert operations(part).count("aten.convolution_backward") == 1
    assert 0 in split.deferred
