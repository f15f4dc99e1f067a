"""Which modules a stage has, where cuts go, and what is not known."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bapipe.errors import BaPipeError
from bapipe.exporters.module_stages import block_stages, module_stages, stage_beginnings
from bapipe.records.plan import LayerPart, Plan
from exported_plans import decoder_plan, table_plan


def with_modules(plan: Plan, *rows: tuple[str, ...]) -> Plan:
    return replace(
        plan,
        stages=tuple(replace(stage, modules=row) for stage, row in zip(plan.stages, rows, strict=True)),
    )


@pytest.fixture(scope="module")
def plan() -> Plan:
    return decoder_plan()


def test_a_list_is_cut_between_its_blocks(plan: Plan) -> None:
    found = module_stages(
        with_modules(
            plan,
            ("m.embed", "m.layers.0.norm", "m.layers.0"),
            ("m.layers.1.norm", "m.layers.1.mlp.0", "m.layers.1.mlp.1", "m.layers.1"),
            ("m.layers.2", "m", "m.norm", "", "head"),
        )
    )
    assert found.stages == (("m.embed", "m.layers.0"), ("m.layers.1",), ("m.layers.2", "m.norm", "head"))
    assert found.moved == ()


def test_a_cut_inside_of_a_block_moves_to_the_stage_that_has_more(plan: Plan) -> None:
    made = with_modules(
        plan,
        ("embed", "layers.0.attn", "layers.0"),
        ("layers.0.norm", "layers.0.mlp", "layers.0", "layers.1.attn", "layers.1"),
        ("layers.1.mlp", "layers.1", "head"),
    )
    found = module_stages(made)
    assert found.stages == (("embed",), ("layers.0", "layers.1"), ("head",))
    assert found.moved == (
        "stages 0, 1 share 'layers.0': all of it goes to stage 1",
        "stages 1, 2 share 'layers.1': all of it goes to stage 1",
    )
    assert stage_beginnings(made) == ("layers.0.norm", "layers.1.mlp")


def test_plain_containers_are_cut_through_and_joined(plan: Plan) -> None:
    """Sequential(Sequential, Sequential) without numbered blocks of their own forward."""
    found = module_stages(with_modules(plan, ("0.0", "0.1"), ("1.0",), ("1.1", "2")))
    assert found.stages == (("0",), ("1.0",), ("1.1", "2"))


def test_a_module_without_parts_is_in_every_stage_that_calls_it(plan: Plan) -> None:
    found = module_stages(with_modules(plan, ("embed", "drop", "layers.0"), ("drop", "layers.1"), ("layers.2",)))
    assert found.stages == (("embed", "drop", "layers.0"), ("drop", "layers.1"), ("layers.2",))


def test_a_split_layer_goes_to_one_stage(plan: Plan) -> None:
    made = with_modules(plan, ("0", "1"), ("1", "2"), ("3",))
    first = replace(made.stages[0], last_layer=1, fractions=(LayerPart(layer=1, start=0, stop=3, of=8),))
    second = replace(made.stages[1], first_layer=1)
    found = module_stages(replace(made, stages=(first, second, made.stages[2])))
    assert found.stages == (("0", "1"), ("2",), ("3",))


def test_a_stage_without_a_whole_module_is_refused(plan: Plan) -> None:
    with pytest.raises(BaPipeError, match=r"stage 1 has no whole module .* plan with fewer --stages"):
        module_stages(with_modules(plan, ("layers.0.a", "layers.0"), ("layers.0.b",), ("layers.1",)))


def test_blocks_are_counted_in_tables_and_modules_alike() -> None:
    table, names = block_stages(table_plan()), block_stages(decoder_plan())
    assert [stage.blocks for stage in table[0]] == [stage.blocks for stage in names[0]]
    assert sum(stage.blocks for stage in table[0]) == 12
    assert [(stage.embedding, stage.head) for stage in table[0]] == [(True, False), (False, False), (False, True)]


def test_what_is_no_list_of_blocks_is_refused(plan: Plan) -> None:
    made = with_modules(plan, ("features.0", "features.1"), ("features.2",), ("classifier.0", "classifier.1"))
    with pytest.raises(BaPipeError, match="one list of blocks, gpt2 has features, classifier"):
        block_stages(made)


def test_plans_without_modules_say_what_to_do(plan: Plan) -> None:
    with pytest.raises(BaPipeError, match=r"a table of layers, not a PyTorch model.*profile your model"):
        module_stages(table_plan())
    with pytest.raises(BaPipeError, match=r"run `bapipe profile mine:build` again"):
        module_stages(with_modules(plan, (), (), ()))
