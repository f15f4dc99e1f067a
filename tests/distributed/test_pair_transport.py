"""Between each two ranks the fastest transport is found once, kept, and used."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

RANKS = 3
CODE = """
import sys, time
from dataclasses import replace
import torch
import torch.distributed as dist
from bapipe.torch.comm import GlooTransport, P2PChannel, TensorShape
from bapipe.torch.comm.pair_transport import PairTransport, fastest, known_times, pairs_of, remember, try_pairs
from bapipe.torch.comm.rank_topology import gathered, place_of

folder, rank = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=3)


class SlowToSecond(GlooTransport):
    # late between the first two ranks, as a transport may be that suits another pair
    name = "slow"

    def send(self, channel, values):
        time.sleep(0.05 if {channel.from_rank, channel.to_rank} == {0, 1} else 0)
        return super().send(channel, values)


class SlowToThird(GlooTransport):
    name = "other"

    def send(self, channel, values):
        time.sleep(0.05 if {channel.from_rank, channel.to_rank} == {1, 2} else 0)
        return super().send(channel, values)


there = [P2PChannel(boundary=i, onward=True, from_rank=i, to_rank=i + 1) for i in range(2)]
message = (TensorShape(shape=(1000,), dtype=torch.float32), TensorShape(shape=(3,), dtype=torch.bool))
channels = {channel: message for onward in there for channel in (onward, onward.reverse)}
cpu = torch.device("cpu")
places = [replace(place, gpu=str(index)) for index, place in enumerate(gathered(place_of(cpu)))]
names = ["slow", "other"]
assert pairs_of(channels) == [(0, 1), (1, 2)]
assert known_times(names, channels, places) == {}
tried = [SlowToSecond(), SlowToThird()]
times = try_pairs(tried, channels, pairs_of(channels), cpu)
assert {pair: fastest(own) for pair, own in times.items()} == {(0, 1): "other", (1, 2): "slow"}, times
remember(times, channels, places)
dist.barrier()
assert known_times(names, channels, places) == times
alike = [replace(place, gpu="0") for place in places]
assert known_times(names, channels, alike) == {}, "other accelerators"
assert known_times([*names, "third"], channels, places) == {}, "a transport that was not tried"
chosen = PairTransport({(0, 1): tried[1], (1, 2): tried[0]})
assert chosen.name == "other+slow"
for channel in there:
    if rank == channel.from_rank:
        chosen.send(channel, [torch.arange(1000.0), torch.ones(3, dtype=torch.bool)])()
    if rank == channel.to_rank:
        assert torch.equal(chosen.receive(channel, message)()[0], torch.arange(1000.0))
dist.barrier()
dist.destroy_process_group()
"""


def test_each_pair_has_its_fastest_transport(tmp_path: Path) -> None:
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "BAPIPE_CACHE": str(tmp_path / "cache")}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", CODE, str(tmp_path), str(rank)],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    said = [process.communicate(timeout=120)[1] for process in ranks]
    assert [process.returncode for process in ranks] == [0] * RANKS, "\n".join(said)
