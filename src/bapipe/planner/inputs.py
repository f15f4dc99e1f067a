"""What `bapipe plan` and `bapipe serve` plan from: a cluster with overrides, and a profile or a layer table."""

from __future__ import annotations

from collections.abc import Mapping

from bapipe.costs.profile import Profile
from bapipe.costs.resolve_model import load_profile
from bapipe.errors import BaPipeError
from bapipe.hardware.cluster import Cluster, is_fpga_cluster
from bapipe.hardware.cluster_file import read_cluster, with_link_bandwidth, with_memory_limit
from bapipe.models.builtin import Argument, builtin_model
from bapipe.models.layer_table import read_layer_table
from bapipe.models.layers import Model
from bapipe.models.model_spec import parse_model_spec
from bapipe.units import parse_bandwidth, parse_bytes

__all__ = ["FPGA_DTYPE", "cluster_with", "goes_on_fpgas", "layers_for_fpgas", "profile_for"]

FPGA_DTYPE = "fp16"
"""where no precision is given: the paper's"""


def cluster_with(
    spec: str,
    *,
    memory_limit: str | None,
    link_bandwidth: str | None,
    names: tuple[str, str] = ("--memory-limit", "--link-bandwidth"),
) -> Cluster:
    """The cluster that `spec` names, with the overrides as they were written; `names` are theirs in messages."""
    cluster = read_cluster(spec)
    if memory_limit:
        cluster = with_memory_limit(cluster, parse_bytes(memory_limit, what=names[0]))
    if link_bandwidth:
        bandwidth = parse_bandwidth(link_bandwidth, what=names[1])
        if bandwidth <= 0:
            raise BaPipeError(f"{names[1]} must be more than 0, got {link_bandwidth}")
        cluster = with_link_bandwidth(cluster, bandwidth)
    return cluster


def goes_on_fpgas(model: str, cluster: Cluster) -> bool:
    """Whether the planner for FPGAs is asked: every accelerator is one, and the model is no measured profile."""
    return is_fpga_cluster(cluster) and parse_model_spec(model).kind not in ("profile", "graph")


def layers_for_fpgas(model: str) -> Model:
    """A built-in model or a layer table. An FPGA has modules per convolution, so blocks are divided."""
    found = parse_model_spec(model)
    if found.kind == "layer table":
        return read_layer_table(found.text)
    if found.kind != "builtin":
        raise BaPipeError(f"FPGAs take a built-in CNN or a layer table (.toml), got '{found.text[:60]}'")
    conv = {"granularity": "conv"} if found.text.lower().startswith("resnet") else {}
    return builtin_model(found.text, **conv)


def profile_for(
    model: str,
    cluster: Cluster,
    *,
    microbatch: int | None,
    precision: str | None,
    batch: int | None = None,
    args: Mapping[str, Argument] | None = None,
) -> Profile:
    """The profile of what `model` names on this cluster: where it is computed, at powers of two up to 128.

    A forced micro-batch is among the sizes. `precision`, `batch` and `args` are as in
    `bapipe.costs.resolve_model.load_profile`. The nodes of a branched graph are put in the row that pipelines over
    this cluster are cut best from.
    """
    sizes = {2**exponent for exponent in range(8)} | ({microbatch} if microbatch and microbatch > 0 else set())
    types = [cluster.types[name] for name in dict.fromkeys(item.type for item in cluster.accelerators)]
    return load_profile(
        model,
        types=types,
        precision=precision,
        microbatches=sorted(sizes),
        batch=batch,
        args=args,
        pipeline=(len(cluster), cluster.stage_links[0].bandwidth),
    )
