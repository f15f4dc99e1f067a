"""What the transports use of torch's private parts, in one place: a test fails when something here moves.

Written against torch 2.11 and 2.13. `torch.multiprocessing` shares CUDA tensors between processes by these calls;
its public half keeps a cache and takes the sender's device number for the receiver's, which is wrong where the two
see different devices.
"""

from __future__ import annotations

import pickle

import torch
from torch import Tensor

__all__ = ["map_memory", "share_memory"]


def share_memory(buffer: Tensor) -> bytes:
    """A handle with which another process of this host maps the buffer's storage; once per buffer.

    torch keeps the memory until the other process has let go of it, even when the buffer goes before.
    """
    gpu = str(torch.cuda.get_device_properties(buffer.device).uuid)
    return pickle.dumps((gpu, buffer.untyped_storage()._share_cuda_()[1:]))  # type: ignore[no-untyped-call]


def map_memory(handle: bytes) -> Tensor:
    """The shared storage as flat uint8, on the same GPU as its owner sees it on.

    Raises a RuntimeError where this process does not see that GPU or the driver refuses.
    """
    gpu, parts = pickle.loads(handle)
    seen = [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]
    if gpu not in seen:
        raise RuntimeError(f"GPU {gpu} cannot be seen from this process")
    index = seen.index(gpu)
    storage = torch.UntypedStorage._new_shared_cuda(index, *parts)
    return torch.empty(0, dtype=torch.uint8, device=torch.device("cuda", index)).set_(
        storage, 0, (storage.nbytes(),), (1,)
    )
