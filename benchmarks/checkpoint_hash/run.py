"""What the checksums of a checkpoint cost; README.md here says what is claimed. Writes result.json here."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
import warnings
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict_saver import save

from bapipe.io.files import write_text
from bapipe.torch.checkpoint import checkpoint_files
from bapipe.torch.checkpoint.checkpoint_files import HashedFile
from bapipe.torch.checkpoint.checkpoint_manifest import SavedFile
from bapipe.torch.checkpoint.tensor_pieces import PieceFiles, PieceWriter, piece_of

LARGEST = 0.25
"""of what hashing in turn costs"""
QUIET = 0.2
"""share of the cores that others, the kernel's own writing among them, may have where a claim is judged"""


class NoHash:
    """In place of the hasher: what a save takes without."""

    def feed(self, data: bytes) -> None:
        """Nothing."""

    def lend(self, data: memoryview) -> None:
        """Nothing."""

    def take_back(self) -> None:
        """Nothing."""

    def finish(self) -> str:
        return ""


class InTurn(NoHash):
    """A hash that the writing thread makes itself."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def feed(self, data: bytes) -> None:
        self._hash.update(data)

    def lend(self, data: memoryview) -> None:
        self._hash.update(data)

    def finish(self) -> str:
        return self._hash.hexdigest()


BESIDE = checkpoint_files._Hasher
WAYS = {"no checksums": NoHash, "in turn": InTurn, "beside": BESIDE}


@dataclass(frozen=True, slots=True)
class Save:
    """One save."""

    seconds: float
    own: float
    """seconds for which the thread that saves computed"""
    others: float
    """share of all cores that other processes had meanwhile"""
    written: dict[str, SavedFile]


def saved(folder: Path, tensors: dict[str, torch.Tensor], way: str) -> Save:
    """Into a new folder, on disk at the end."""
    folder.mkdir()
    checkpoint_files._Hasher = WAYS[way]  # type: ignore[misc, assignment]
    try:
        writer = PieceFiles(folder)
        before, own = busy(), sum(os.times()[:2])
        begin, computed = time.perf_counter(), time.thread_time()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # there is one process
            pieces = {name: [piece_of(tensor)] for name, tensor in tensors.items()}
            save(pieces, storage_writer=writer, planner=PieceWriter(), no_dist=True)
        seconds, computed = time.perf_counter() - begin, time.thread_time() - computed
        used = busy() - before - (sum(os.times()[:2]) - own)
        return Save(seconds, computed, max(0.0, used) / seconds / (os.cpu_count() or 1), writer.written)
    finally:
        checkpoint_files._Hasher = BESIDE  # type: ignore[misc]


def busy() -> float:
    """Seconds for which all cores together have computed, for any process or other machine."""
    fields = [int(item) for item in Path("/proc/stat").read_text(encoding="ascii").split()[1:9]]
    idle = fields[3] + fields[4]
    return (sum(fields) - idle) / os.sysconf("SC_CLK_TCK")


def measure(place: Path, gigabytes: float, rounds: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    count = round(gigabytes * 1e9 / (4 * 2**22))
    tensors = {f"model/{index}": torch.randn(2**22, generator=generator) for index in range(count)}
    tensors |= {f"model/bias{index}": torch.randn(1024, generator=generator) for index in range(count)}
    saves: dict[str, list[Save]] = {way: [] for way in WAYS}
    verified: list[float] = []
    for number in range(rounds):
        ways = list(WAYS)
        for way in ways[number % 3 :] + ways[: number % 3]:
            with tempfile.TemporaryDirectory(dir=place) as folder:
                done = saved(Path(folder) / "checkpoint", tensors, way)
                saves[way].append(done)
                if way == "beside":
                    begin = time.perf_counter()
                    for name, file in done.written.items():
                        HashedFile(Path(folder) / "checkpoint" / name, size=file.size, sha256=file.sha256)
                    verified.append(time.perf_counter() - begin)
            os.sync()
    best = {way: min(several, key=lambda one: one.seconds) for way, several in saves.items()}
    plain = best["no checksums"].seconds
    return {
        "bytes": sum(file.size for file in best["beside"].written.values()),
        "rounds": rounds,
        "best_s": {way: round(one.seconds, 4) for way, one in best.items()},
        "others": {way: round(one.others, 3) for way, one in best.items()},
        "cost": {way: round(one.seconds / plain - 1, 4) for way, one in best.items()},
        "thread_s": {way: round(min(one.own for one in several), 4) for way, several in saves.items()},
        "median_s": {
            way: round(statistics.median(one.seconds for one in several), 4) for way, several in saves.items()
        },
        "seconds": {way: [round(one.seconds, 4) for one in several] for way, several in saves.items()},
        "verify_s": round(min(verified), 4),
    }


def hash_speed() -> float:
    data, begin, rounds = bytes(2**24), time.perf_counter(), 16
    for _ in range(rounds):
        hashlib.sha256(data)
    return rounds * len(data) / (time.perf_counter() - begin)


def environment() -> dict[str, object]:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return {
        "cpu": next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), ""),
        "sha_instructions": any("sha_ni" in line for line in lines),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "bapipe": version("bapipe"),
        "sha256_bytes_per_s": round(hash_speed()),
        "load": os.getloadavg()[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--disk", type=Path, default=Path.cwd(), help="folder on the disk to save to")
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"), help="folder in memory")
    parser.add_argument("--gigabytes", type=float, default=0.5)
    parser.add_argument("--rounds", type=int, default=25)
    options = parser.parse_args()
    result: dict[str, Any] = {"environment": environment(), "places": {}}
    for name, place in (("disk", options.disk), ("memory", options.memory)):
        assert shutil.disk_usage(place).free > 2e9 * options.gigabytes, f"{place} lacks room"
        result["places"][name] = measure(place, options.gigabytes, options.rounds)
    write_text(Path(__file__).with_name("result.json"), json.dumps(result, indent=1) + "\n")
    print(table(result))
    disk = result["places"]["disk"]
    if max(disk["others"].values()) > QUIET:
        print("other processes computed meanwhile, and the hash had no core of its own: claim 1 is not judged")
        return
    share = disk["cost"]["beside"] / disk["cost"]["in turn"]
    assert share <= LARGEST, f"hashing beside the write costs {share:.0%} of hashing in turn"


def table(result: dict[str, Any]) -> str:
    """As README.md shows it."""
    lines = ["| to | no checksums | in turn | beside the write | verify |", "|---|---|---|---|---|"]
    for name, found in result["places"].items():
        cells = [
            f"{found['best_s'][way]:.3f} s" + (f" ({found['cost'][way]:+.1%})" if way != "no checksums" else "")
            for way in WAYS
        ]
        lines.append(f"| {name} | {' | '.join(cells)} | {found['verify_s']:.3f} s |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
