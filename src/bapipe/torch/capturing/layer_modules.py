"""Which of the model's modules run in which layer: what other engines name when they cut a model."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx, nn

from bapipe.torch.capturing.aliases import input_nodes
from bapipe.torch.capturing.layer_groups import Group
from bapipe.torch.capturing.linearise import Program
from bapipe.torch.capturing.torch_internals import module_path

__all__ = ["layer_modules"]


def layer_modules(program: Program, module: nn.Module, groups: Sequence[Group]) -> tuple[tuple[str, ...], ...]:
    """For each layer the innermost modules whose operations it has, in order, by their paths; '' is the model.

    A module whose operations every stage repeats (rotary positions, masks) counts where it is first used. One that
    leaves no operation (an identity, dropout that is off) goes with the module that is defined before it.
    """
    found: list[dict[str, None]] = []
    free: set[str] = set()
    for group in groups:
        steps = program.steps[group.start : group.stop]
        own = dict.fromkeys(
            program.calls[node].path if node in program.calls else module_path(node) for node in steps
        )
        first = {path: None for node in steps for path in _free_paths(program, node) if path not in free}
        free |= first.keys()
        found.append(own | first)
    _add_silent(module, found)
    return tuple(tuple(own) for own in found)


def _free_paths(program: Program, step: fx.Node) -> list[str]:
    """Modules of what the step uses and no step computes."""
    paths: dict[str, None] = {}
    waiting, seen = list(input_nodes((step.args, step.kwargs))), set()
    while waiting:
        node = waiting.pop()
        if node in seen or program.kinds[node] != "free":
            continue
        seen.add(node)
        paths[module_path(node)] = None
        waiting.extend(input_nodes((node.args, node.kwargs)))
    return [path for path in reversed(paths) if path]


def _add_silent(module: nn.Module, found: list[dict[str, None]]) -> None:
    """Give modules of which no layer has an operation to the layer of the module before."""
    heard = {path: index for index, own in enumerate(found) for path in own}
    above = {".".join(path.split(".")[:length]) for path in heard for length in range(path.count(".") + 2)}
    before, silent = 0, ""
    for path, _ in module.named_modules():
        if path in above:
            before = heard.get(path, before)
        elif not silent or not path.startswith(f"{silent}."):
            silent = path
            found[before][path] = None
