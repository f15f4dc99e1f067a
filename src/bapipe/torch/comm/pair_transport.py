"""The fastest transport for every pair of ranks: tried once with a message of the run, and kept for later runs."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from bapipe.errors import BaPipeError
from bapipe.io.cache_folder import cache_folder
from bapipe.io.files import write_text
from bapipe.torch.comm.channel import Message, P2PChannel, Transport, guarded
from bapipe.torch.comm.packing import packed_size
from bapipe.torch.comm.rank_topology import Place, gathered

__all__ = [
    "Pair",
    "PairTransport",
    "Times",
    "fastest",
    "known_times",
    "pair_of",
    "pairs_of",
    "remember",
    "try_pairs",
]

Pair = tuple[int, int]
"""two ranks, the lower one first"""
Times = dict[str, float]
"""transport -> seconds of one message"""

_ROUNDS = 5
_TAG = 0
"""of the answers, below every channel's"""
_FILE = "transports.json"


def pair_of(channel: P2PChannel) -> Pair:
    """The ranks at the ends of a channel."""
    first, second = sorted((channel.from_rank, channel.to_rank))
    return first, second


def pairs_of(channels: Iterable[P2PChannel]) -> list[Pair]:
    """All pairs that talk, in an order that is the same on every rank."""
    return sorted({pair_of(channel) for channel in channels})


def _largest(channels: Mapping[P2PChannel, Message], pair: Pair) -> P2PChannel:
    """The channel of a pair with the largest message."""
    own = sorted((item for item in channels if pair_of(item) == pair), key=lambda item: (item.tag, item.from_rank))
    return max(own, key=lambda item: packed_size(channels[item]))


def try_pairs(
    transports: Sequence[Transport],
    channels: Mapping[P2PChannel, Message],
    pairs: Iterable[Pair],
    device: torch.device,
) -> dict[Pair, Times]:
    """Seconds that the largest message of each pair takes by each transport. Collective; the same on every rank.

    A pair measures while others may do so too, as in a run.
    """
    own: dict[Pair, Times] = {}
    for pair in pairs:
        if dist.get_rank() in pair:
            channel = _largest(channels, pair)
            times = {item.name: _seconds(item, channel, channels[channel], device) for item in transports}
            if dist.get_rank() == channel.from_rank:
                own[pair] = times
    return {pair: times for found in gathered(own) for pair, times in found.items()}


def _seconds(transport: Transport, channel: P2PChannel, message: Message, device: torch.device) -> float:
    """The median of a few messages, each from its sending to the receiver's answer; after one to warm up."""
    answer, samples = torch.zeros(1, dtype=torch.uint8), []
    for _ in range(_ROUNDS + 1):
        if dist.get_rank() == channel.from_rank:
            values = [torch.zeros(about.shape, dtype=about.dtype, device=device) for about in message]
            _settle(device)
            start = time.perf_counter()
            delivered = transport.send(channel, values)
            with guarded(channel.to_rank):
                dist.recv(answer, channel.to_rank, tag=_TAG)
            samples.append(time.perf_counter() - start)
            delivered()
        else:
            transport.receive(channel, message)()
            _settle(device)
            with guarded(channel.from_rank):
                dist.send(answer, channel.from_rank, tag=_TAG)
    return statistics.median(samples[1:]) if samples else 0.0


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def fastest(times: Times) -> str:
    """The transport with the least time."""
    return min(times, key=lambda name: times[name])


def _key(places: Sequence[Place], pair: Pair, message: Message) -> str:
    """What the times of a pair depend on; sizes count by powers of two."""
    ends = [f"{place.host}/{place.gpu}/{place.part}" for place in (places[rank] for rank in pair)]
    return " ".join([*ends, str(packed_size(message).bit_length()), str(torch.__version__)])


def known_times(
    names: Sequence[str], channels: Mapping[P2PChannel, Message], places: Sequence[Place]
) -> dict[Pair, Times]:
    """What an earlier run found, of pairs for which it tried all these transports. Collective: rank 0 reads."""
    table: list[dict[str, Times]] = [_read() if dist.get_rank() == 0 else {}]
    with guarded(None):
        dist.broadcast_object_list(table, 0)
    found = {}
    for pair in pairs_of(channels):
        times = table[0].get(_key(places, pair, channels[_largest(channels, pair)]), {})
        if set(names) <= set(times):
            found[pair] = {name: times[name] for name in names}
    return found


def remember(times: Mapping[Pair, Times], channels: Mapping[P2PChannel, Message], places: Sequence[Place]) -> None:
    """Keep what was found for other runs on the same accelerators, if the folder can be written."""
    if dist.get_rank() or not times:
        return
    table = _read()
    for pair, own in times.items():
        table[_key(places, pair, channels[_largest(channels, pair)])] = dict(own)
    try:
        cache_folder().mkdir(parents=True, exist_ok=True)
        write_text(cache_folder() / _FILE, json.dumps(table, indent=1, sort_keys=True))
    except (OSError, BaPipeError):
        return


def _read() -> dict[str, Times]:
    """The file's table; nothing where it is missing or not as `remember` writes it."""
    try:
        table = json.loads((cache_folder() / _FILE).read_text(encoding="utf-8"))
        return {
            str(key): {str(name): float(value) for name, value in times.items()} for key, times in table.items()
        }
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


class PairTransport:
    """Hands every channel to the transport of its pair."""

    def __init__(self, by_pair: Mapping[Pair, Transport]) -> None:
        self._by_pair = dict(by_pair)
        self._all = list({id(item): item for item in by_pair.values()}.values())
        self.name = "+".join(dict.fromkeys(item.name for item in self._all))

    def receive(self, channel: P2PChannel, message: Message) -> Callable[[], tuple[Tensor, ...]]:
        return self._by_pair[pair_of(channel)].receive(channel, message)

    def send(self, channel: P2PChannel, values: Sequence[Tensor]) -> Callable[[], None]:
        return self._by_pair[pair_of(channel)].send(channel, values)

    def close(self) -> None:
        for transport in self._all:
            transport.close()
