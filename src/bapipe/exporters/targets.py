"""The engines that plans are exported to: what each can hold of a plan, and in which versions."""

from __future__ import annotations

from dataclasses import dataclass

from bapipe.errors import BaPipeError, nearest
from bapipe.exporters.plan_features import Feature

__all__ = ["TARGETS", "Target", "find_target", "find_version"]

_ENGINE_ORDER = frozenset({Feature.STAGES_PER_RANK, Feature.REPLICAS})


_ONE_STAGE_PER_RANK = frozenset(
    {Feature.STAGES_PER_RANK, Feature.UNEVEN_STAGES, Feature.PLACEMENT, Feature.SHORT_BATCH}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One engine. What is in neither `holds` nor `refuses` is lost, and the export says so."""

    name: str
    """as `--to` takes it"""
    title: str
    """as its makers call it"""
    writes: str
    """what the export is"""
    ending: str
    """of the file that is written by default"""
    versions: tuple[str, ...]
    """known ones, the default last; an export for 0.16 is one for 0.16.1"""
    holds: frozenset[Feature]
    """mixed precision is held where the engine's own configuration has it"""
    refuses: frozenset[Feature] = frozenset()
    """what makes the export fail, as the engine would compute something else or nothing"""
    same: bool = True
    """whether its fields are alike in all known versions"""


TARGETS = {
    target.name: target
    for target in (
        Target(
            name="torch",
            title="torch.distributed.pipelining",
            writes="a script for torchrun with the cuts and the order",
            ending=".py",
            versions=("2.11", "2.12", "2.13"),
            holds=frozenset(
                {
                    Feature.INNER_CUTS,
                    Feature.ORDER,
                    Feature.STAGES_PER_RANK,
                    Feature.UNEVEN_STAGES,
                    Feature.PLACEMENT,
                    Feature.TIED,
                }
            ),
            refuses=frozenset(
                {Feature.SPLIT_LAYERS, Feature.REPLICAS, Feature.UNEVEN_REPLICAS, Feature.SHORT_BATCH}
            ),
        ),
        Target(
            name="torchtitan",
            title="torchtitan",
            writes="a ParallelismConfig (0.2: TOML), and the order as CSV",
            ending=".py",
            versions=("0.2", "main", "0.3"),
            holds=frozenset({Feature.MIXED_PRECISION, Feature.ORDER, Feature.STAGES_PER_RANK, Feature.REPLICAS}),
            refuses=frozenset({Feature.UNEVEN_STAGES, Feature.PLACEMENT, Feature.SHORT_BATCH}),
            same=False,
        ),
        Target(
            name="automodel",
            title="NeMo Automodel",
            writes="YAML with `module_fqns_per_model_part`, and the order as CSV",
            ending=".yaml",
            versions=("0.7",),
            holds=frozenset({Feature.MIXED_PRECISION, Feature.ORDER, Feature.STAGES_PER_RANK, Feature.REPLICAS}),
            refuses=frozenset({Feature.UNEVEN_STAGES, Feature.PLACEMENT, Feature.SHORT_BATCH}),
        ),
        Target(
            name="megatron",
            title="Megatron-LM and Megatron-Core",
            writes="arguments with `--pipeline-model-parallel-layout`",
            ending=".args",
            versions=("0.13", "0.14", "0.15", "0.16"),
            holds=frozenset({Feature.MIXED_PRECISION, *_ENGINE_ORDER, Feature.TIED}),
            refuses=frozenset({Feature.UNEVEN_STAGES, Feature.PLACEMENT, Feature.SHORT_BATCH}),
        ),
        Target(
            name="deepspeed",
            title="DeepSpeed",
            writes="a module with a PipelineModule that has the plan's cuts, and its configuration as JSON",
            ending=".py",
            versions=("0.17", "0.18", "0.19"),
            holds=frozenset({Feature.MIXED_PRECISION, Feature.REPLICAS}),
            refuses=_ONE_STAGE_PER_RANK,
        ),
        Target(
            name="colossalai",
            title="Colossal-AI",
            writes="arguments of HybridParallelPlugin",
            ending=".py",
            versions=("0.5",),
            holds=frozenset({Feature.MIXED_PRECISION, *_ENGINE_ORDER, Feature.TIED}),
            refuses=frozenset({Feature.UNEVEN_STAGES, Feature.PLACEMENT, Feature.SHORT_BATCH}),
        ),
        Target(
            name="flagscale",
            title="FlagScale",
            writes="YAML with `hetero_pipeline_layer_split` and process meshes",
            ending=".yaml",
            versions=("0.9",),
            holds=frozenset(
                {Feature.MIXED_PRECISION, Feature.REPLICAS, Feature.UNEVEN_REPLICAS, Feature.DEVICES, Feature.TIED}
            ),
            refuses=_ONE_STAGE_PER_RANK,
        ),
        Target(
            name="device-map",
            title="transformers and accelerate",
            writes="JSON with the device of each module, for `device_map`",
            ending=".json",
            versions=("1.15",),
            holds=frozenset(
                {
                    Feature.MIXED_PRECISION,
                    Feature.STAGES_PER_RANK,
                    Feature.UNEVEN_STAGES,
                    Feature.PLACEMENT,
                    Feature.DEVICES,
                    Feature.TIED,
                    Feature.SHORT_BATCH,
                }
            ),
        ),
    )
}
"""by name"""


def find_target(name: str) -> Target:
    """The engine of that name."""
    if name not in TARGETS:
        raise BaPipeError(
            f"unknown target '{name[:60]}'{nearest(name, TARGETS)}; export --to one of {', '.join(TARGETS)}"
        )
    return TARGETS[name]


def find_version(target: Target, version: str | None) -> str:
    """The known version that a text such as 0.16.1 means; None: the default one."""
    if version is None:
        return target.versions[-1]
    found = [known for known in target.versions if version == known or version.startswith(f"{known}.")]
    if not found:
        known = ", ".join(sorted(target.versions))
        raise BaPipeError(
            f"exports for {target.title} are known for {known}, got --target-version '{version[:40]}'; give one "
            "of these, the nearest, and check that the engine reads it"
        )
    return found[0]
