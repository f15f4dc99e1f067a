"""Every target: its grammar, what is lost of a plan and said so, versions, and what is refused."""

from __future__ import annotations

import ast
import json
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from bapipe.errors import BaPipeError
from bapipe.exporters.export_plan import WRITERS, export_plan
from bapipe.exporters.megatron_layout import parse_layout
from bapipe.exporters.plan_features import Feature
from bapipe.exporters.targets import TARGETS
from bapipe.records.plan import Plan, write_plan
from bapipe.schedule.schedule_file import from_torch_csv
from command import bapipe, refused
from exported_plans import decoder_plan, table_plan


@pytest.fixture(scope="module")
def plan() -> Plan:
    return decoder_plan()


def lost(plan: Plan, to: str) -> set[Feature]:
    return set(export_plan(plan, to).losses)


def blocks_of(plan: Plan) -> list[int]:
    return [len({path.split(".")[2] for path in stage.modules if ".h." in path}) for stage in plan.stages]


def arguments(text: str) -> dict[str, str]:
    return dict(line.split(" ", 1) for line in text.splitlines() if not line.startswith("#"))


def test_every_target_is_written_and_says_what_it_is(plan: Plan) -> None:
    assert set(WRITERS) == set(TARGETS)
    for name in TARGETS:
        made = export_plan(plan, name)
        header = next(text for path, text in made.files.items() if not path.endswith((".json", ".csv")))
        assert f"gpt2 for {TARGETS[name].title} {TARGETS[name].versions[-1]}, from a BaPipe plan" in header
        for feature, text in made.losses.items():
            assert f"  {feature.value}: {text}" in header


def test_megatron_reads_the_blocks_of_each_stage(plan: Plan) -> None:
    made = export_plan(plan, "megatron", out="layout.args")
    given = arguments(made.files["layout.args"])
    stages = parse_layout(given["--pipeline-model-parallel-layout"])
    assert int(given["--pipeline-model-parallel-size"]) == len(stages) == 3
    assert sum(stage.blocks for stage in stages) == int(given["--num-layers"]) == 12
    assert (given["--micro-batch-size"], given["--global-batch-size"]) == ("2", "24")
    assert Feature.ORDER not in made.losses  # its own 1F1B is the plan's order


def test_another_order_is_lost_where_the_engine_has_its_own(plan: Plan) -> None:
    gpipe = decoder_plan(schedule="gpipe")
    engines = ("megatron", "deepspeed", "colossalai", "flagscale")
    assert all(Feature.ORDER in lost(gpipe, name) for name in engines)
    assert not any(Feature.ORDER in lost(plan, name) for name in engines)
    assert not any(Feature.ORDER in lost(gpipe, name) for name in ("torch", "torchtitan", "automodel"))
    assert Feature.ORDER in lost(plan, "device-map")


def test_interleaved_stages_are_virtual_stages_of_megatron() -> None:
    made = table_plan(None, model="gpt2-medium", cluster="2xv100", schedule="interleaved")  # type: ignore[arg-type]
    export = export_plan(made, "megatron", out="x")
    given = arguments(export.files["x"])
    assert given["--pipeline-model-parallel-size"] == "2"
    assert len(parse_layout(given["--pipeline-model-parallel-layout"])) == len(made.stages) > 2
    assert Feature.ORDER in export.losses  # it is made for the times of these stages
    with pytest.raises(BaPipeError, match="FlagScale cannot run a plan with several stages per rank"):
        export_plan(made, "flagscale")


def test_torchtitan_follows_its_versions(plan: Plan) -> None:
    made = export_plan(plan, "torchtitan", out="t.toml", version="0.2.2")
    table = tomllib.loads(made.files["t.toml"])["parallelism"]
    rows = table["module_fqns_per_model_part"]
    assert rows[0][:2] == ["tok_embeddings", "layers.0"]
    assert rows[-1][-2:] == ["norm", "output"]
    assert [name for row in rows for name in row if name.startswith("layers.")] == [
        f"layers.{i}" for i in range(12)
    ]
    assert table["pipeline_parallel_schedule_csv"] == "t.csv"
    assert table["pipeline_parallel_microbatch_size"] == 2
    order = from_torch_csv(made.files["t.csv"])
    assert (order.num_stages, order.num_microbatches, order.num_ranks) == (3, 12, 3)
    newer = export_plan(plan, "torchtitan", out="t.py").files["t.py"]
    call = ast.parse(newer).body[-1].value  # type: ignore[attr-defined]
    given = {item.arg: item.value for item in call.keywords}
    assert ast.literal_eval(given["module_fqns_per_model_part"])[-1][-1] == "lm_head"
    assert ast.literal_eval(given["pipeline_parallel_microbatch_size"]) == 2
    newest = export_plan(plan, "torchtitan", version="main", out="t.py").files["t.py"]
    assert "num_pp_microbatches=12" in newest
    assert "microbatch_size=" not in newest
    own = export_plan(decoder_plan(prefix=""), "torchtitan", out="t.py").files["t.py"]
    assert '["wte", "wpe", "drop", "h.0"' in own  # names that torchtitan finds stay


def test_automodel_names_the_models_own_modules(plan: Plan) -> None:
    made = export_plan(plan, "automodel", out="a.yaml")
    table = yaml.safe_load(made.files["a.yaml"])["distributed"]
    assert table["pp_size"] == 3
    rows = table["pipeline"]["module_fqns_per_model_part"]
    assert rows[0][:3] == ["transformer.wte", "transformer.wpe", "transformer.drop"]
    assert rows[-1][-2:] == ["transformer.ln_f", "lm_head"]
    assert table["pipeline"]["pp_schedule_csv"] == "a.csv"
    assert "a.csv" in made.files
    stages = tuple(replace(s, modules=(*s.modules, "transformer.rotary_emb")) if i == 0 else s
                   for i, s in enumerate(plan.stages))  # fmt: skip
    rows = yaml.safe_load(export_plan(replace(plan, stages=stages), "automodel", out="a").files["a"])
    assert all(row[-1] == "transformer.rotary_emb" for row in
               rows["distributed"]["pipeline"]["module_fqns_per_model_part"])  # fmt: skip


def test_deepspeed_gets_a_list_of_cuts(plan: Plan) -> None:
    made = export_plan(plan, "deepspeed", out="d.py")
    values = {
        node.targets[0].id: ast.literal_eval(node.value)  # type: ignore[attr-defined]
        for node in ast.parse(made.files["d.py"]).body
        if isinstance(node, ast.Assign)
    }
    parts = values["PARTS"]
    assert (parts[0], parts[-1], len(parts)) == (0, len(values["LAYERS"]), 4)
    assert len(values["LAYERS"]) == 3 + 12 + 2
    config = json.loads(made.files["d.json"])
    assert (
        config["train_batch_size"]
        == config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"]
    )


def test_colossalai_counts_blocks(plan: Plan) -> None:
    text = export_plan(plan, "colossalai", out="c.py").files["c.py"]
    given = ast.literal_eval(ast.parse(text).body[0].value)  # type: ignore[attr-defined]
    assert len(given["num_layers_per_stage"]) == given["pp_size"] * given["num_model_chunks"] == 3
    assert sum(given["num_layers_per_stage"]) == 12
    assert given["pp_style"] == "1f1b"


def test_flagscale_has_meshes_for_mixed_accelerators() -> None:
    made = table_plan(2, cluster="1xv100+1xa100")
    system = yaml.safe_load(export_plan(made, "flagscale", out="f").files["f"])["system"]
    meshes = system["hetero"]["hetero_process_meshes"]
    assert len(meshes) == 5 * len(system["hetero"]["hetero_device_types"])
    assert sum(meshes[4::5]) == system["pipeline_model_parallel_size"] == 2
    assert sum(system["hetero"]["hetero_pipeline_layer_split"]) == 12
    assert sorted(system["hetero"]["hetero_device_types"]) == ["a100-40", "v100-16"]
    assert Feature.DEVICES in lost(made, "megatron")
    assert Feature.DEVICES not in lost(made, "flagscale")


def test_a_device_map_places_every_module_once(plan: Plan) -> None:
    made = export_plan(plan, "device-map", out="m.json")
    places = json.loads(made.files["m.json"])
    assert set(places.values()) == {0, 1, 2}
    assert [places[f"transformer.h.{number}"] for number in range(12)] == sorted(
        places[f"transformer.h.{number}"] for number in range(12)
    )
    assert "one accelerator computes at a time" in made.files["m.txt"]


def test_what_a_plan_holds_besides_is_lost_or_refused(plan: Plan) -> None:
    again = replace(plan, stages=(replace(plan.stages[0], recompute=True), *plan.stages[1:]))
    assert all(Feature.RECOMPUTATION in lost(again, name) for name in TARGETS)
    tied = replace(plan, stages=(*plan.stages[:2], replace(plan.stages[2], tied=("embedding",))))
    assert {name for name in TARGETS if Feature.TIED in lost(tied, name)} == {
        "torchtitan",
        "automodel",
        "deepspeed",
    }
    short = replace(plan, global_batch=23)
    for name in set(TARGETS) - {"device-map"}:
        with pytest.raises(BaPipeError, match="short last micro-batch: the last micro-batch has 1 of 2 samples"):
            export_plan(short, name)
    mixed = replace(plan, dtype="bf16-mixed")
    assert Feature.MIXED_PRECISION in lost(mixed, "torch")


def test_plans_that_no_engine_runs_are_refused(plan: Plan) -> None:
    with pytest.raises(BaPipeError, match=r"has one stage, so there is nothing to cut"):
        export_plan(table_plan(1, cluster="1xv100"), "megatron")
    endless = replace(plan, schedule=replace(plan.schedule, flushes=False))
    with pytest.raises(BaPipeError, match="several weight versions"):
        export_plan(endless, "torch")
    with pytest.raises(BaPipeError, match="a table of layers without code to train"):
        export_plan(table_plan(), "torch")


def test_the_command_warns_and_strict_refuses(tmp_path: Path) -> None:
    made = decoder_plan(schedule="gpipe")
    write_plan(made, tmp_path / "plan.json")
    told = bapipe("export", "plan.json", "--to", "megatron", "-o", "layout.args", folder=tmp_path)
    assert told.returncode == 0
    assert (
        "warning: Megatron-LM and Megatron-Core cannot hold order of the actions: the order of gpipe"
        in told.stderr
    )
    assert "wrote layout.args" in told.stdout
    assert (tmp_path / "layout.args").read_text() == export_plan(made, "megatron", out="layout.args").files[
        "layout.args"
    ]
    (tmp_path / "layout.args").unlink()
    strict = bapipe("export", "plan.json", "--to", "megatron", "-o", "layout.args", "--strict", folder=tmp_path)
    assert strict.returncode == 2
    assert "order of the actions (the order of gpipe, 1F1B runs instead); plan again" in strict.stderr
    assert not (tmp_path / "layout.args").exists()


def test_wrong_targets_and_versions_are_one_line(plan: Plan, tmp_path: Path) -> None:
    write_plan(plan, tmp_path / "plan.json")
    path = str(tmp_path / "plan.json")
    assert "did you mean 'megatron'" in refused("export", path, "--to", "megatrom")
    assert "known for 0.13, 0.14, 0.15, 0.16" in refused(
        "export", path, "--to", "megatron", "--target-version", "0.9"
    )
    assert "exported --to an engine" in refused("export", path)
    assert "give a plan.json and --to ENGINE" in refused("export", "saved")
    assert "given by -o" in refused("export", path, "out.py", "--to", "torch")
