"""Plans of a small decoder whose layers have the module names of transformers' GPT-2, for tests of exports."""

from __future__ import annotations

from dataclasses import replace

from bapipe import plan
from bapipe.models.layers import ModelRef
from bapipe.records.plan import Plan

__all__ = ["decoder_plan", "table_plan"]

_HALVES = {
    "attention": ("ln_1", "attn.c_attn", "attn", "attn.c_proj", ""),
    "mlp": ("ln_2", "mlp.c_fc", "mlp.act", "mlp.c_proj", ""),
}
"""of a block: the modules of its two layers; the block's own forward adds the residual in both"""


def table_plan(
    stages: int = 3, *, model: str = "gpt2", cluster: str = "3xv100", schedule: str = "1f1b-sno"
) -> Plan:
    """A plan of a built-in table: its layers have no modules."""
    return plan(model, cluster, global_batch=24, micro_batch=2, schedule=schedule, stages=stages)


def decoder_plan(
    stages: int = 3, *, cluster: str = "3xv100", schedule: str = "1f1b-sno", prefix: str = "transformer."
) -> Plan:
    """The same with modules, as a plan of a profiled model has them."""
    made = table_plan(stages, cluster=cluster, schedule=schedule)
    return replace(
        made,
        model=ModelRef(name="gpt2", ref="mine:build"),
        stages=tuple(
            replace(
                stage,
                modules=tuple(dict.fromkeys(path for layer in stage.layers for path in _modules(layer, prefix))),
            )
            for stage in made.stages
        ),
    )


def _modules(layer: str, prefix: str) -> list[str]:
    if layer.startswith("block-"):
        number, _, half = layer.removeprefix("block-").partition(".")
        return [f"{prefix}h.{number}.{name}".rstrip(".") for name in _HALVES[half]]
    names = {"embedding": ["wte", "wpe", "drop"], "norm": ["ln_f"]}
    return [f"{prefix}{name}" for name in names[layer]] if layer in names else ["", "lm_head"]
