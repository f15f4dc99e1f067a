"""Jobs of Kubeflow: their fields are those of the published schemas, and what a pod runs trains."""

from __future__ import annotations

import ast
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

yaml = pytest.importorskip("yaml", reason="reads what is written for Kubernetes: pip install pyyaml")

from bapipe.cli.launch import launch_command  # noqa: E402
from bapipe.errors import BaPipeError  # noqa: E402
from bapipe.records.plan import Plan, read_plan, write_plan  # noqa: E402
from bapipe.torch.launch.kubernetes_jobs import as_yaml, pytorch_job, train_job  # noqa: E402
from bapipe.torch.launch.ray_script import ray_script  # noqa: E402
from paths import REPOSITORY  # noqa: E402

PROGRAM = ["train.py", "two words", "it's $(HOME)"]
CONTAINER = {"name": str, "image": str, "command": [str], "ports": [{"name": str, "containerPort": int}]}
REPLICAS = {
    "replicas": int,
    "restartPolicy": str,
    "template": {"spec": {"containers": [{**CONTAINER, "resources": {"limits": {"*": (int, str)}}}]}},
}
"""what is written of the fields of PyTorchJob v1 (training-operator 1.9) and TrainJob v1alpha1 (trainer 2)"""
PYTORCHJOB = {
    "apiVersion": str,
    "kind": str,
    "metadata": {"name": str},
    "spec": {
        "runPolicy": {"cleanPodPolicy": str, "backoffLimit": int},
        "pytorchReplicaSpecs": {"*": REPLICAS},
    },
}
TRAINJOB = {
    "apiVersion": str,
    "kind": str,
    "metadata": {"name": str},
    "spec": {
        "runtimeRef": {"name": str},
        "trainer": {
            "image": str,
            "numNodes": int,
            "numProcPerNode": int,
            "command": [str],
            "resourcesPerNode": {"limits": {"*": (int, str)}},
        },
    },
}


def require(found: Any, grammar: Any, where: str = "") -> None:
    if isinstance(grammar, dict):
        assert isinstance(found, dict), where
        for key, value in found.items():
            assert key in grammar or "*" in grammar, f"{where}.{key} is no field of the schema"
            require(value, grammar.get(key, grammar.get("*")), f"{where}.{key}")
    elif isinstance(grammar, list):
        assert isinstance(found, list), where
        for item in found:
            require(item, grammar[0], where)
    else:
        assert isinstance(found, grammar), f"{where} is {found!r}"


@pytest.fixture
def apart() -> Plan:
    """The example's two ranks on two nodes, of which one has an odd name."""
    plan = read_plan(REPOSITORY / "examples" / "plan.json")
    nodes = ("left", "right-side")
    named = [
        replace(one, name=f"{node}/0", node=node)
        for one, node in zip(plan.cluster.accelerators, nodes, strict=True)
    ]
    stages = [replace(stage, accelerators=(one.name,)) for stage, one in zip(plan.stages, named, strict=True)]
    cluster = replace(plan.cluster, accelerators=tuple(named), between=plan.cluster.within)
    return replace(plan, cluster=cluster, stages=tuple(stages))


def test_a_pytorchjob_has_a_master_and_the_other_nodes_as_workers(apart: Plan) -> None:
    job = pytorch_job(apart, PROGRAM, image="registry/train:1", port=4000)
    assert yaml.safe_load(as_yaml(job)) == job
    require(job, PYTORCHJOB)
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    specs = job["spec"]["pytorchReplicaSpecs"]
    assert {name: spec["replicas"] for name, spec in specs.items()} == {"Master": 1, "Worker": 1}
    for spec in specs.values():
        (container,) = spec["template"]["spec"]["containers"]
        assert container["name"] == "pytorch"  # the operator gives its variables to this one
        assert container["ports"] == [{"name": "pytorchjob-port", "containerPort": 4000}]
        assert container["resources"] == {"limits": {"cpu": 1}}


def test_a_trainjob_names_its_runtime(apart: Plan) -> None:
    job = train_job(apart, PROGRAM, image="registry/train:1", runtime="torch-distributed")
    assert yaml.safe_load(as_yaml(job)) == job
    require(job, TRAINJOB)
    assert (job["apiVersion"], job["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    assert job["spec"]["trainer"]["numNodes"] == 2
    assert "$$(HOME)" in job["spec"]["trainer"]["command"][-1]  # Kubernetes makes $(HOME) of it, and not more


def test_names_are_those_that_kubernetes_takes(apart: Plan) -> None:
    odd = replace(apart, model=replace(apart.model, name="My_Model 7B!" + "x" * 90))
    name = pytorch_job(odd, ["x.py"], image="i")["metadata"]["name"]
    assert name.startswith("bapipe-my-model-7b-xxx")
    assert len(name) <= 63


def test_the_script_for_ray_is_python_and_names_every_node(apart: Plan) -> None:
    text = ray_script(apart, PROGRAM, port=4000)
    names = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in ast.parse(text).body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    assert names == {"NODES": [("left", 1), ("right-side", 1)], "PROGRAM": PROGRAM, "PORT": 4000}
    assert "use_gpu=False" in text


def test_a_job_without_an_image_is_refused(apart: Plan, tmp_path: Path) -> None:
    write_plan(apart, tmp_path / "plan.json")
    done = CliRunner().invoke(launch_command, [str(tmp_path / "plan.json"), "--to", "trainjob"])
    assert isinstance(done.exception, BaPipeError)
    assert str(done.exception) == "a trainjob needs the container that its pods run; give --image"


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def test_pods_train_with_the_environment_that_the_operator_sets(apart: Plan, tmp_path: Path) -> None:
    """Every pod's command, in a process of its own in place of a container, with both operators' variables."""
    pytest.importorskip("torch", reason="running a plan needs torch: pip install bapipe[torch]")
    write_plan(apart, tmp_path / "plan.json")
    done = CliRunner().invoke(
        launch_command,
        f"{tmp_path}/plan.json --to pytorchjob --image i --steps 2 --out {tmp_path}/run.json",
    )
    assert done.exception is None, done.output
    job = yaml.safe_load(done.output)
    port = str(free_port())
    pods = []
    for index, role in enumerate(("Master", "Worker")):
        (container,) = job["spec"]["pytorchReplicaSpecs"][role]["template"]["spec"]["containers"]
        given = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "RANK": str(index)}
        given |= {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": port, "PET_NNODES": "2"}
        given |= {"PET_NODE_RANK": str(index), "PYTHONUNBUFFERED": "1"}
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        environment = {**os.environ, **given, "PATH": path, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        pods.append(
            subprocess.Popen(
                container["command"],
                env={**environment, "PYTHONPATH": str(REPOSITORY)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        said = [pod.communicate(timeout=600)[0] for pod in pods]
    finally:
        for pod in pods:
            pod.kill()
    assert [pod.returncode for pod in pods] == [0, 0], said
    assert "step 1  loss" in said[0]
    assert (tmp_path / "run.json").is_file()
