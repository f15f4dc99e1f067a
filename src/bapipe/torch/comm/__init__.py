"""How tensors get from rank to rank: one interface, several transports."""

from bapipe.torch.comm.channel import (
    LinkError,
    Message,
    P2PChannel,
    TensorShape,
    Transport,
    guarded,
)
from bapipe.torch.comm.choose_transport import make_transport
from bapipe.torch.comm.gloo import GlooTransport
from bapipe.torch.comm.ipc import IpcTransport
from bapipe.torch.comm.nccl import NcclTransport
from bapipe.torch.comm.p2p_queues import Inbox, Outbox
from bapipe.torch.comm.staged import StagedTransport

__all__ = [
    "GlooTransport",
    "Inbox",
    "IpcTransport",
    "LinkError",
    "Message",
    "NcclTransport",
    "Outbox",
    "P2PChannel",
    "StagedTransport",
    "TensorShape",
    "Transport",
    "guarded",
    "make_transport",
]
