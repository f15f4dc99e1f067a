"""A plan as a job of Kubeflow on Kubernetes: PyTorchJob (v1) or TrainJob (Trainer v2). Imports no torch.

Both operators start one pod per node and tell each by its environment which it is and where the first one listens:
PET_NODE_RANK, PET_MASTER_ADDR and PET_MASTER_PORT. The pod with number i is the plan's node i.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bapipe.errors import BaPipeError
from bapipe.records.plan import Plan
from bapipe.torch.launch.node_commands import job_name, node_script, ranks_by_node

__all__ = ["as_yaml", "pytorch_job", "train_job"]

_GPU = "nvidia.com/gpu"


def pytorch_job(plan: Plan, program: Sequence[str], *, image: str, port: int = 29500) -> dict[str, Any]:
    """The manifest of a PyTorchJob, kubeflow.org/v1: a master for the first node, workers for the others.

    The container is called pytorch and its port pytorchjob-port, as the operator looks for them.
    """
    nodes = len(ranks_by_node(plan))
    container = {
        "name": "pytorch",
        "image": image,
        "command": ["bash", "-c", _script(plan, program)],
        "ports": [{"name": "pytorchjob-port", "containerPort": port}],
        "resources": {"limits": _resources(plan)},
    }
    replica = {"restartPolicy": "Never", "template": {"spec": {"containers": [container]}}}
    specs = {"Master": {"replicas": 1, **replica}}
    if nodes > 1:
        specs["Worker"] = {"replicas": nodes - 1, **replica}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": job_name(plan)},
        "spec": {"runPolicy": {"cleanPodPolicy": "None", "backoffLimit": 0}, "pytorchReplicaSpecs": specs},
    }


def train_job(plan: Plan, program: Sequence[str], *, image: str, runtime: str) -> dict[str, Any]:
    """The manifest of a TrainJob, trainer.kubeflow.org/v1alpha1, on a cluster runtime of torch."""
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": job_name(plan)},
        "spec": {
            "runtimeRef": {"name": runtime},
            "trainer": {
                "image": image,
                "numNodes": len(ranks_by_node(plan)),
                "numProcPerNode": max(map(len, ranks_by_node(plan).values())),
                "command": ["bash", "-c", _script(plan, program)],
                "resourcesPerNode": {"limits": _resources(plan)},
            },
        },
    }


def _script(plan: Plan, program: Sequence[str]) -> str:
    script = node_script(plan, program, index="PET_NODE_RANK", head="PET_MASTER_ADDR", port="PET_MASTER_PORT")
    return script.replace("$(", "$$(")  # Kubernetes would put a variable in the place of $(NAME)


def _resources(plan: Plan) -> dict[str, int]:
    """What a pod may use: all are alike, so what the node with most ranks needs."""
    most = max(map(len, ranks_by_node(plan).values()))
    kinds = {plan.cluster.type_of(index).kind for index in range(len(plan.cluster.accelerators))}
    if kinds - {"gpu", "cpu"}:
        raise BaPipeError(f"pods have GPUs or CPUs, the plan is for {', '.join(sorted(kinds))}; plan for those")
    return {_GPU if "gpu" in kinds else "cpu": most}


def as_yaml(value: Mapping[str, Any]) -> str:
    """A manifest as YAML, by block; texts of several lines as they are."""
    return "\n".join(_lines(value)) + "\n"


def _lines(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _entry(f"{key}:", item)
    else:
        for item in value:
            yield from _entry("-", item)


def _entry(head: str, item: Any) -> Iterator[str]:
    if isinstance(item, str) and "\n" in item:
        yield f"{head} |-"
        yield from (f"  {line}" for line in item.split("\n"))
    elif isinstance(item, (Mapping, list)) and item:
        inner = list(_lines(item))
        if head == "-":
            yield f"- {inner[0]}"
            inner = inner[1:]
        else:
            yield head
        yield from (f"  {line}" for line in inner)
    else:
        yield f"{head} {json.dumps(item)}"
