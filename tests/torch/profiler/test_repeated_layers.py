"""Equal blocks are measured once, and the profile is that of the whole model."""

from __future__ import annotations

import itertools
import random
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="measuring is torch's: pip install bapipe[torch]")

from torch import nn  # noqa: E402

from bapipe.hardware.precision import find_precision  # noqa: E402
from bapipe.models.layers import ModelRef  # noqa: E402
from bapipe.torch.capturing import capture  # noqa: E402
from bapipe.torch.capturing.layer_signature import layer_signatures  # noqa: E402
from bapipe.torch.profiler import MeasureSettings, profile_module  # noqa: E402
from bapipe.torch.profiler.layer_memory import weigh  # noqa: E402
from bapipe.torch.profiler.layer_runner import CapturedLayers, LayerSequence, chain_of  # noqa: E402
from bapipe.torch.profiler.measurement import MeasuredLayer  # noqa: E402
from bapipe.torch.profiler.repeated_layers import find_repeats, kept_layers  # noqa: E402
from bapipe.torch.zoo.gpt import build_gpt  # noqa: E402

CPU = torch.device("cpu")


def small_gpt(blocks: int, **options: Any) -> Any:
    return build_gpt(blocks=blocks, width=16, heads=2, vocabulary=32, sequence=8, dropout=0.0, **options)


@pytest.mark.parametrize(
    ("signatures", "kept"),
    [
        ("", ""),
        ("abcd", "abcd"),
        ("abab", "abab"),  # two blocks are kept as they are
        ("eamamamamh", "eamamh"),
        ("eamamamanh", "eamamanh"),  # the last block ends otherwise
        ("aaaaab", "aaab"),  # or no layer would be between two of its like
        ("abcabcabcxyxyxyxy", "abcabcxyxy"),
    ],
)
def test_of_a_run_of_equal_blocks_two_are_kept(signatures: str, kept: str) -> None:
    assert "".join(signatures[index] for index in kept_layers(signatures)) == kept


def test_every_layer_has_one_like_it_between_neighbours_like_its_own() -> None:
    """Also for random sequences: each pair of kept neighbours follows each other in the model."""
    draw = random.Random(0)
    for _ in range(300):
        signatures = "".join(
            "".join(draw.choices("abc", k=draw.randint(1, 3))) * draw.randint(1, 6) for _ in range(3)
        )
        layers = [
            MeasuredLayer(name=str(index), parameters=1, weight_bytes=4.0) for index in range(len(signatures))
        ]
        kept = kept_layers(signatures)
        short = "".join(signatures[index] for index in kept)
        follows = set(itertools.pairwise(signatures))
        assert set(itertools.pairwise(short)) <= follows
        repeats = find_repeats(signatures, kept, layers)
        if repeats is None:
            assert short == signatures
            continue
        for index, signature in enumerate(signatures):
            assert {short[other] for other in repeats.timed_as[index]} == {signature}
            other = repeats.weighed_as[index]
            assert short[max(0, other - 1) : other + 2] == signatures[max(0, index - 1) : index + 2]


def test_signatures_do_not_depend_on_names_or_values_but_on_shapes_and_operations() -> None:
    def signatures(module: nn.Module, *args: Any) -> tuple[str, ...]:
        captured = capture(module, args, check=False)
        return layer_signatures(captured.program, captured.groups)

    x = torch.rand(2, 4)
    same = signatures(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)), x)
    assert same[1] == same[2]
    assert len({*same}) == 3  # the first receives nothing and the last sends nothing
    bias = signatures(
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4, bias=False), nn.Linear(4, 2)), x
    )
    assert bias[1] != bias[2]
    other = nn.Sequential(
        nn.Linear(4, 4),
        nn.Sequential(nn.Linear(4, 4), nn.LeakyReLU(0.1)),
        nn.Sequential(nn.Linear(4, 4), nn.LeakyReLU(0.2)),
        nn.Linear(4, 2),
    )
    slopes = signatures(other, x)
    assert slopes[1] != slopes[2]
    frozen = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    frozen[2].requires_grad_(False)
    trained = signatures(frozen, x)
    assert trained[1] != trained[2]


def expanded(chain: LayerSequence, row: tuple[float, ...]) -> tuple[float, ...]:
    assert chain.repeats is not None
    return tuple(row[index] for index in chain.repeats.weighed_as if row)


@pytest.mark.parametrize("tied", [False, True])
def test_bytes_of_the_short_chain_are_those_of_the_model(tied: bool) -> None:
    module, args, kwargs = small_gpt(6, tied=tied)
    short = chain_of(module, args, kwargs, device=CPU, precision=find_precision("fp32"))
    full = CapturedLayers(capture(module, args, kwargs), device=CPU, dtype=torch.float32)
    assert len(short.layers) == 8 < len(full.layers) == 14
    mine = weigh(short, [short.piece(index, index) for index in range(len(short.layers))], 3)
    theirs = weigh(full, [full.piece(index, index) for index in range(len(full.layers))], 3)
    for item in fields(mine):
        if item.name != "microbatch":
            assert expanded(short, getattr(mine, item.name)) == getattr(theirs, item.name), item.name


def test_a_piece_over_a_gap_runs_what_stands_on_both_sides() -> None:
    """The short chain has the output of the model with so many blocks as it kept."""
    module, args, kwargs = small_gpt(5)
    short = chain_of(module, args, kwargs, device=CPU, precision=find_precision("fp32"))
    few, _, _ = small_gpt(3)
    state = module.state_dict()
    few.load_state_dict({name: state[name.replace("blocks.2.", "blocks.4.")] for name in few.state_dict()})
    whole = short.piece(0, len(short.layers) - 1)
    (found,) = whole.run(*(args[root] for root in whole.roots))
    assert torch.allclose(found, few(*args), atol=1e-6)
    found.sum().backward()
    trained = [name for name, parameter in module.named_parameters() if parameter.grad is not None]
    assert not any(name.startswith(("blocks.2.", "blocks.3.")) for name in trained)
    assert {id(item) for item in whole.parameters} == {
        id(dict(module.named_parameters())[name]) for name in trained
    }


def test_a_profile_has_all_layers_and_equal_ones_have_equal_costs(tmp_path: Path) -> None:
    module, args, kwargs = small_gpt(6)
    done: list[str] = []
    found = profile_module(
        module,
        args,
        kwargs,
        model=ModelRef(name="gpt"),
        settings=MeasureSettings(microbatches=(2,), iterations=1, folder=tmp_path),
        optimizer="adam",
        threads=1,
        report=lambda label, _: done.append(label),
    )
    (table,) = found.profile.accelerators.values()
    names = [layer.name for layer in found.profile.layers]
    assert len(names) == len(table.forward[0]) == len(table.update) == 14
    for row in (table.forward[0], table.backward[0], table.saved_activations[0], table.update):
        assert row[3] == row[5] == row[7] > 0
    assert not any("blocks.3" in label for label in done)
    assert table.optimizer_state == pytest.approx(8.0, rel=0.01)  # two moments in fp32 and a step count per weight
    assert 0.0 < table.optimizer_workspace <= 8.0  # of the largest weight, the root of its second moments, twice
