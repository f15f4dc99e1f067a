"""A rank finds its place: the process group of a plan, the rank that the plan has here, and its device."""

from __future__ import annotations

import datetime
import os

import torch
import torch.distributed as dist

from bapipe.errors import BaPipeError
from bapipe.io.run_folder import found_folder
from bapipe.records.plan import Plan
from bapipe.torch.comm.gloo_groups import meet

__all__ = ["device_of", "join", "planned_rank"]


def join(plan: Plan, timeout: float) -> int:
    """Join the process group, unless there is one, and return this rank's number.

    torchrun numbers ranks node by node. Where the environment names this node (BAPIPE_NODE, as `bapipe launch`
    sets it), local rank k is the k-th rank that the plan has on that node, whatever torchrun calls it. `timeout`
    is how many seconds a silent rank is waited for in a group that is made here.
    """
    needed, started = len(plan.ranks), int(os.environ.get("WORLD_SIZE", "1"))
    joined = dist.is_initialized()
    if joined:
        started = dist.get_world_size()
    if started != needed:
        raise BaPipeError(
            f"the plan needs {needed} ranks, {started} were started; start it with torchrun "
            f"--nproc-per-node {needed}, with bapipe run, or as bapipe launch --print says"
        )
    wanted = _named_rank(plan)
    if joined and "gloo" not in str(dist.get_backend_config()):
        raise BaPipeError(
            f"the process group has {dist.get_backend()} alone, and ranks agree over gloo; call "
            "init_process_group('cpu:gloo,cuda:nccl'), or leave it to the Pipeline"
        )
    if not joined:
        _join(wanted, needed, datetime.timedelta(seconds=timeout))
    rank = dist.get_rank()
    if wanted is not None and rank != wanted:
        raise BaPipeError(
            f"the plan has rank {wanted} where the process group has rank {rank}; make the Pipeline without "
            "calling init_process_group first"
        )
    return rank


def _join(wanted: int | None, needed: int, patience: datetime.timedelta) -> None:
    """Meet the other ranks: at the file of a local run's launcher, or at torchrun's store.

    Those that torchrun starts again keep its store, which still has what the first ones left there, so every
    attempt has its own part of it.
    """
    folder = found_folder()
    if folder is not None:
        meet(folder, int(os.environ["RANK"]), needed, patience)
        return
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if attempt != "0" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        all_attempts = dist.TCPStore(*address, is_master=False, timeout=patience)  # type: ignore[attr-defined]
        store = dist.PrefixStore(f"bapipe/attempt/{attempt}", all_attempts)  # type: ignore[attr-defined]
        rank = int(os.environ["RANK"]) if wanted is None else wanted
        dist.init_process_group("gloo", store=store, rank=rank, world_size=needed, timeout=patience)
    elif wanted is None:
        dist.init_process_group("gloo", timeout=patience)
    else:
        dist.init_process_group("gloo", timeout=patience, rank=wanted, world_size=needed)


def planned_rank(plan: Plan) -> int:
    """This process's rank before it has joined the others."""
    named = _named_rank(plan)
    return int(os.environ.get("RANK", "0")) if named is None else named


def _named_rank(plan: Plan) -> int | None:
    """The rank that the plan has at this place of this node; None where the environment does not name the node."""
    node = os.environ.get("BAPIPE_NODE")
    if node is None:
        return None
    nodes = {accelerator.name: accelerator.node for accelerator in plan.cluster.accelerators}
    here = [rank for rank, name in enumerate(plan.ranks) if nodes[name] == node]
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if local >= len(here):
        raise BaPipeError(
            f"the plan has {len(here)} ranks on node '{node}', this is local rank {local}; start the command that "
            "bapipe launch --print writes for each node"
        )
    return here[local]


def device_of(plan: Plan, device: torch.device | str | None) -> torch.device:
    """The device that is asked for, or the one that the plan has for this rank.

    A GPU is counted by its accelerator's name, `node/index`, modulo those that torch sees: ranks that share one,
    or see one each, take that. So is it where "cuda" is asked for without an index.
    """
    asked = None if device is None else torch.device(device)
    if asked is not None and (asked.type != "cuda" or asked.index is not None):
        return asked
    name = plan.ranks[dist.get_rank()]
    position = next(i for i, item in enumerate(plan.cluster.accelerators) if item.name == name)
    if asked is None and plan.cluster.type_of(position).kind != "gpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise BaPipeError(f"rank {dist.get_rank()} is to run on a GPU, but torch sees none; give device='cpu'")
    index = name.rpartition("/")[2]
    number = int(index if index.isdigit() else os.environ.get("LOCAL_RANK", "0"))
    return torch.device("cuda", number % torch.cuda.device_count())
