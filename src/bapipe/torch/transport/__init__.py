"""How tensors get from rank to rank: one interface, several transports."""

from bapipe.torch.transport.boxes import Inbox, Outbox
from bapipe.torch.transport.choose import TRANSPORTS, make_transport
from bapipe.torch.transport.gloo import GlooTransport
from bapipe.torch.transport.ipc import IpcTransport
from bapipe.torch.transport.nccl import NcclTransport
from bapipe.torch.transport.staged import StagedTransport
from bapipe.torch.transport.wire import (
    LinkError,
    Message,
    TensorShape,
    Transport,
    Wire,
    guarded,
)

__all__ = [
    "TRANSPORTS",
    "GlooTransport",
    "Inbox",
    "IpcTransport",
    "LinkError",
    "Message",
    "NcclTransport",
    "Outbox",
    "StagedTransport",
    "TensorShape",
    "Transport",
    "Wire",
    "guarded",
    "make_transport",
]
