"""What to start on each node of a plan: torchrun's exact command, and a batch script for SLURM. Imports no torch.

torchrun numbers ranks node by node, so a plan whose stages go back and forth between nodes has other numbers than
torchrun. Every command therefore names its node in BAPIPE_NODE, and a rank takes its number from the plan
(`bapipe.torch.runtime.process_group`).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bapipe.records.plan import Plan

__all__ = ["NodeCommand", "job_name", "node_commands", "node_script", "ranks_by_node", "slurm_script"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCommand:
    """What one node runs."""

    node: str
    ranks: tuple[int, ...]
    """the plan's, in the order of local ranks"""
    environment: Mapping[str, str]
    command: tuple[str, ...]

    @property
    def line(self) -> str:
        """For a shell."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*variables, shlex.join(self.command)])


def ranks_by_node(plan: Plan) -> dict[str, tuple[int, ...]]:
    """The ranks of every node, nodes in the order in which ranks first come to them."""
    nodes = {accelerator.name: accelerator.node for accelerator in plan.cluster.accelerators}
    found: dict[str, list[int]] = {}
    for rank, name in enumerate(plan.ranks):
        found.setdefault(nodes[name], []).append(rank)
    return {node: tuple(ranks) for node, ranks in found.items()}


def node_commands(
    plan: Plan, program: Sequence[str], *, head: str | None = None, port: int = 29500
) -> tuple[NodeCommand, ...]:
    """The command of each node. `program` is a script with its arguments, or `-m` and a module with its own.

    Ranks meet on the first node, at `head` (its address; default: the node's name) and `port`. Start all of them
    within torchrun's patience, by default 15 minutes.
    """
    by_node = ranks_by_node(plan)
    address = head or next(iter(by_node))
    return tuple(
        NodeCommand(
            node=node,
            ranks=ranks,
            environment={"BAPIPE_NODE": node},
            command=(*_torchrun(len(by_node), str(index), str(len(ranks)), address, port), *program),
        )
        for index, (node, ranks) in enumerate(by_node.items())
    )


def _torchrun(nodes: int, index: str, ranks: str, head: str, port: int) -> list[str]:
    command = ["torchrun", "--nnodes", str(nodes), "--node-rank", index, "--nproc-per-node", ranks]
    return [*command, "--master-addr", head, "--master-port", str(port)]


def node_script(plan: Plan, program: Sequence[str], *, index: str, head: str, port: str) -> str:
    """What a shell runs on any node: which one it is says `index`, a variable of the environment, as do `head` and
    `port`, where the ranks meet."""
    by_node = ranks_by_node(plan)
    torchrun = ["torchrun", "--nnodes", str(len(by_node)), "--node-rank", f'"${index}"']
    torchrun += ["--nproc-per-node", f'"${{ranks[${index}]}}"', "--master-addr", f'"${head}"']
    torchrun += ["--master-port", port if port.isdigit() else f'"${port}"']
    return "\n".join(
        [
            f"nodes=({' '.join(shlex.quote(node) for node in by_node)})",
            f"ranks=({' '.join(str(len(ranks)) for ranks in by_node.values())})",
            f'export BAPIPE_NODE="${{nodes[${index}]}}"',
            f"exec {' '.join(torchrun)} {shlex.join(program)}",
        ]
    )


def job_name(plan: Plan) -> str:
    """A name for a job of a plan that every batch system takes: lower-case letters, digits and dashes."""
    return f"bapipe-{re.sub(r'[^a-z0-9]+', '-', plan.model.name.lower()).strip('-')}"[:40].rstrip("-")


def slurm_script(plan: Plan, program: Sequence[str], *, port: int = 29500) -> str:
    """A batch script: the plan's nodes are the job's nodes, in order; ranks meet on the first."""
    by_node = ranks_by_node(plan)
    most = max(len(ranks) for ranks in by_node.values())
    kinds = {plan.cluster.type_of(index).kind for index in range(len(plan.cluster.accelerators))}
    resource = f"#SBATCH --gpus-per-node={most}" if "gpu" in kinds else f"#SBATCH --cpus-per-task={most}"
    inner = node_script(plan, program, index="SLURM_NODEID", head="BAPIPE_HEAD", port=str(port))
    return "\n".join(
        [
            "#!/bin/bash",
            f"#SBATCH --job-name=bapipe-{re.sub(r'[^A-Za-z0-9._-]+', '-', plan.model.name)}",
            f"#SBATCH --nodes={len(by_node)}",
            "#SBATCH --ntasks-per-node=1",
            resource,
            'export BAPIPE_HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
            f"srun --kill-on-bad-exit=1 bash -c {shlex.quote(inner)}",
            "",
        ]
    )
