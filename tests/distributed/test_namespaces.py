"""Two nodes with a network between them, in namespaces: detected into one file, trained as launch writes it."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="running a plan needs torch: pip install bapipe[torch]")

from click.testing import CliRunner

from bapipe.cli.cluster_detect import detect_command
from bapipe.hardware.cluster_file import read_cluster
from bapipe.records.plan import read_plan, write_plan
from bapipe.records.run_record import read_run
from bapipe.torch.launch.node_commands import node_commands
from loaded_files import load_file
from paths import REPOSITORY

namespaces = load_file(REPOSITORY / "benchmarks" / "overlap" / "namespaces.py", "nodes_namespaces")
REASON = namespaces.why_not()
BINARIES = Path(sys.executable).parent


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.skipif(REASON is not None, reason=str(REASON))
def test_two_nodes_are_detected_and_trained_over_their_network(tmp_path: Path) -> None:
    with namespaces.chain(2) as nodes:
        out = tmp_path / "cluster.toml"
        options = ["--hosts", ",".join(nodes.names), "--via", "ip netns exec {host} sh -c", "--ranks", "1"]
        options += ["--remote", str(BINARIES / "bapipe"), "--between", "1 Gb/s", "-o", str(out)]
        done = CliRunner().invoke(detect_command, options)
        assert done.exception is None, done.output
        cluster = read_cluster(str(out))
        assert cluster.nodes == nodes.names

        plan = read_plan(REPOSITORY / "examples" / "plan.json")
        stages = [
            replace(stage, accelerators=(one.name,))
            for stage, one in zip(plan.stages, cluster.accelerators, strict=True)
        ]
        write_plan(replace(plan, cluster=cluster, stages=tuple(stages)), tmp_path / "plan.json")
        program = ["-m", "bapipe.torch.launch.worker", str(tmp_path / "plan.json")]
        program.append(f'{{"steps":2,"out":"{tmp_path}/run.json"}}')
        commands = node_commands(read_plan(tmp_path / "plan.json"), program, head="10.77.0.1")
        started = []
        for index, command in enumerate(commands):
            environment = {
                **os.environ,
                **command.environment,
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": str(REPOSITORY),
            }
            environment["PATH"] = f"{BINARIES}{os.pathsep}{environment['PATH']}"
            environment["GLOO_SOCKET_IFNAME"] = nodes.interface(index)
            words = [*nodes.enter(index), *command.command]
            started.append(
                subprocess.Popen(
                    words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
                )
            )
        try:
            said = [process.communicate(timeout=600)[0] for process in started]
        finally:
            for process in started:
                process.kill()
        assert [process.returncode for process in started] == [0, 0], said
    record = read_run(tmp_path / "run.json")
    assert len(record.steps) == 2
