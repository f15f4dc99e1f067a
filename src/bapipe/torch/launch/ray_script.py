"""A plan as a script that Ray Train runs: one worker per node of the plan, each of which starts torchrun there.

Imports neither torch nor Ray.
"""

from __future__ import annotations

from collections.abc import Sequence

from bapipe.records.plan import Plan
from bapipe.torch.launch.node_commands import job_name, ranks_by_node

__all__ = ["ray_script"]

_TEMPLATE = '''"""Start of a BaPipe plan by Ray Train; written by bapipe launch --to ray.

python {file}                                       on a machine of the cluster
ray job submit --working-dir . -- python {file}     from elsewhere
"""

import os
import subprocess

import ray.train
import ray.util
from ray.train import RunConfig, ScalingConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

NODES = {nodes!r}  # of the plan, with the ranks of each
PROGRAM = {program!r}
PORT = {port}


def start_node(config):
    """Worker i runs the ranks of the plan's node i; they meet at the first."""
    import ray.train.collective

    number = ray.train.get_context().get_world_rank()
    head = ray.train.collective.broadcast_from_rank_zero(ray.util.get_node_ip_address())
    name, ranks = NODES[number]
    torchrun = ["torchrun", "--nnodes", str(len(NODES)), "--node-rank", str(number)]
    torchrun += ["--nproc-per-node", str(ranks), "--master-addr", head, "--master-port", str(PORT), *PROGRAM]
    code = subprocess.run(torchrun, env={{**os.environ, "BAPIPE_NODE": name}}, cwd=config["folder"]).returncode
    if code:
        raise RuntimeError(f"torchrun of node {{name}} ended with code {{code}}")


if __name__ == "__main__":
    most = max(ranks for _, ranks in NODES)
    trainer = DataParallelTrainer(
        start_node,
        train_loop_config={{"folder": os.getcwd()}},
        scaling_config=ScalingConfig(
            num_workers=len(NODES),
            use_gpu={gpu},
            resources_per_worker={{{resource!r}: most}},
            placement_strategy="SPREAD",
        ),
        run_config=RunConfig(name={name!r}),
    )
    trainer.fit()
'''


def ray_script(plan: Plan, program: Sequence[str], *, port: int = 29500, file: str = "start_ray.py") -> str:
    """A script that starts the plan on a cluster of Ray; workers get nodes of their own where there are enough."""
    kinds = {plan.cluster.type_of(index).kind for index in range(len(plan.cluster.accelerators))}
    return _TEMPLATE.format(
        file=file,
        nodes=[(node, len(ranks)) for node, ranks in ranks_by_node(plan).items()],
        program=list(program),
        port=port,
        gpu="gpu" in kinds,
        resource="GPU" if "gpu" in kinds else "CPU",
        name=job_name(plan),
    )
