"""Everything that needs a GPU, in the order of its worth, within a time: each part is a command of its own.

    on_gpu.py --folder WORK --budget 560 --pack work.tar.gz      on a GPU
    on_gpu.py --folder WORK --offline                            what needs none: plans, from the profiles
    on_gpu.py --folder WORK --list                               what is done, and what is left
    on_gpu.py --folder WORK --tiny                               a rehearsal on two CPU ranks

Every part goes on where it stopped and has a folder with its log and its result; `--parts peers,recompute` runs
those alone. On a machine that is new, `--unpack work.tar.gz` begins with what was packed. WORK/summary.json says
what was done and what is left.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "benchmarks" / "peers_training"), str(ROOT / "src")]
FAULTS = 24
"""of the matrix, run on slices"""
PIPEDREAM = 200
"""runs of a small VGG-16 by PipeDream"""
TESTS = ("test_nccl_slices", "test_run_gpu", "test_precision_gpu", "test_gpu_memory", "test_measure_gpu")
"""files of tests/gpu"""
MARGIN = 10.0
"""seconds that a part is told to end before it would be ended"""
LIMIT = 16 * 2**20
"""bytes of a packed folder beyond which a word is said"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """Where the parts run."""

    folder: Path
    tiny: bool

    def of(self, part: str) -> Path:
        """The folder of a part."""
        path = self.folder / part
        path.mkdir(parents=True, exist_ok=True)
        return path

    @property
    def on_slices(self) -> list[str]:
        """Options of the programs of benchmarks/reliability."""
        return ["--device", "cpu"] if self.tiny else ["--device", "cuda", "--slices"]


State = Callable[[Runs], tuple[int, int, str]]
"""how much is done, of how much, and what came of it"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One command, in as many calls as it takes."""

    name: str
    least: float
    """seconds left without which it is not begun"""
    command: Callable[[Runs, float], Sequence[str]]
    """what to run, with so many seconds left"""
    state: State
    """how much is done, of how much, and what came of it"""
    offline: bool = False
    """whether it needs no GPU"""


def _json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def _tests(file: str) -> Part:
    """A file of tests/gpu; run again where it did not end."""
    name = f"tests-{file.removeprefix('test_')}"

    def command(runs: Runs, left: float) -> list[str]:  # noqa: ARG001
        junit = runs.of(name) / "junit.xml"
        chosen = f"tests/gpu/{file}.py"
        return ["-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", chosen, f"--junitxml={junit}"]

    def state(runs: Runs) -> tuple[int, int, str]:
        junit = runs.of(name) / "junit.xml"
        if not junit.exists():
            return 0, 1, "not run"
        suite = ElementTree.parse(junit).getroot().find("testsuite")
        assert suite is not None
        counts = {key: int(suite.get(key, "0")) for key in ("tests", "failures", "errors", "skipped")}
        return 1, 1, ", ".join(f"{count} {key}" for key, count in counts.items())

    return Part(name=name, least=60.0, command=command, state=state)


def _soak_command(runs: Runs, left: float) -> list[str]:
    folder = runs.of("soak")
    words = ["benchmarks/reliability/soak.py", *runs.on_slices, "--seconds", f"{left - MARGIN:.0f}"]
    words += ["--work", str(folder / "work"), "--out", str(folder / "result.json")]
    return [*words, *(["--steps", "100"] if runs.tiny else [])]


def _soak_state(runs: Runs) -> tuple[int, int, str]:
    found = _json(runs.of("soak") / "result.json")
    if found is None:
        return 0, 1, "not done"
    return 1, 1, "; ".join(found["problems"]) or f"{found['settings']['steps']} steps, flat and equal"


def _faults_known(runs: Runs) -> list[dict[str, Any]]:
    found = _json(runs.of("faults") / "result.json")
    return [] if found is None else list(found["rows"])


def _faults_wanted(runs: Runs) -> int:
    return 2 if runs.tiny else FAULTS


def _faults_command(runs: Runs, left: float) -> list[str]:
    words = ["benchmarks/reliability/faults.py", *runs.on_slices, "--jobs", "1" if runs.tiny else "4"]
    words += ["--minutes", f"{max(0.5, (left - 60) / 60):.2f}", "--out", str(runs.of("faults") / "result.json")]
    return [*words, "--limit", str(_faults_wanted(runs) - len(_faults_known(runs)))]


def _faults_state(runs: Runs) -> tuple[int, int, str]:
    rows = _faults_known(runs)
    held = sum(not row["problems"] for row in rows)
    return len(rows), _faults_wanted(runs), f"{held} of {len(rows)} held"


def _pipedream_command(runs: Runs, left: float) -> list[str]:
    times, jobs = ("2", "1") if runs.tiny else (str(PIPEDREAM), "12")
    words = ["benchmarks/reliability/pipedream_runs.py", "--times", times, "--jobs", jobs]
    words += ["--device", "cpu" if runs.tiny else "cuda", "--seconds", f"{left - MARGIN:.0f}"]
    return [*words, "--out", str(runs.of("pipedream") / "result.json")]


def _pipedream_state(runs: Runs) -> tuple[int, int, str]:
    found = _json(runs.of("pipedream") / "result.json") or {"runs": 0, "failed": []}
    return found["runs"], 2 if runs.tiny else PIPEDREAM, f"{len(found['failed'])} of {found['runs']} failed"


def _rows(
    name: str, program: str, rows: Sequence[str], *options: str, least: float = 120.0, tiny: Sequence[str] = ()
) -> Part:
    """Rows of a benchmark that keeps them by name in result.json of its folder; a rehearsal may run fewer."""

    def wanted(runs: Runs) -> Sequence[str]:
        return tiny if runs.tiny and tiny else rows

    def command(runs: Runs, left: float) -> list[str]:
        words = [program, "--folder", str(runs.of(name)), "--budget", f"{left - MARGIN:.0f}", *options]
        return [*words, "--rows", ",".join(wanted(runs)), *(["--tiny"] if runs.tiny else [])]

    def state(runs: Runs) -> tuple[int, int, str]:
        known = _json(runs.of(name) / "result.json") or {}
        done = [row for row in wanted(runs) if row in known]
        failed = [row for row in done if "error" in known[row]]
        return len(done), len(wanted(runs)), f"failed: {', '.join(failed)}" if failed else f"{len(done)} rows"

    return Part(name=name, least=least, command=command, state=state)


TINY_PEERS = "vgg16 fp32 eager 4"
"""rows of peers_training that a rehearsal runs"""


def _peers(name: str, until: str, state: Callable[[Runs], tuple[int, int, str]], *, offline: bool = False) -> Part:
    """peers_training, as far as that; all in one folder."""

    def command(runs: Runs, left: float) -> list[str]:
        words = ["benchmarks/peers_training/run.py", "--folder", str(runs.of("peers")), "--until", until]
        words += ["--budget", f"{left - MARGIN:.0f}"]
        return [*words, *(["--tiny", "--rows", TINY_PEERS] if runs.tiny else [])]

    return Part(name=name, least=130.0, command=command, state=state, offline=offline)


def _settings(runs: Runs) -> list[Any]:
    from contenders import SETTINGS

    return [own for own in SETTINGS if not runs.tiny or own.name == TINY_PEERS]


def _profiles_state(runs: Runs) -> tuple[int, int, str]:
    from run import Rows

    work = Rows(runs.of("peers"), tiny=runs.tiny, budget=0.0)
    missing = [own.name for own in _settings(runs) if not work.is_known(own)]
    wanted = len(_settings(runs))
    return wanted - len(missing), wanted, f"missing: {', '.join(missing)}" if missing else "all are known"


def _plans_state(runs: Runs) -> tuple[int, int, str]:
    """Of every setting whose profile is known the automatic plan, or why there is none."""
    from run import Rows

    work = Rows(runs.of("peers"), tiny=runs.tiny, budget=0.0)
    known = [own for own in _settings(runs) if work.is_known(own)]
    done = [own for own in known if work.is_planned(own)]
    return len(done), len(known), f"{len(done)} settings planned"


def _peers_state(runs: Runs) -> tuple[int, int, str]:
    from contenders import row_names

    known = _json(runs.of("peers") / "rows.json") or {}
    wanted = [row for row in row_names() if not runs.tiny or row.startswith(TINY_PEERS)]
    done = [row for row in wanted if row in known]
    failed = sum("error" in known[row] for row in done)
    return len(done), len(wanted), f"{len(done) - failed} rows ran, {failed} failed"


RECOMPUTE = ("layers", "stages", "layers 1f1b", "stages 1f1b")
PARTS = (
    *(_tests(file) for file in TESTS),
    Part(name="soak", least=60.0, command=_soak_command, state=_soak_state),
    Part(name="faults", least=120.0, command=_faults_command, state=_faults_state),
    Part(name="pipedream", least=60.0, command=_pipedream_command, state=_pipedream_state),
    _rows("sharding4", "benchmarks/sharding/run.py", ["fits zero", "fits plain"], "--ranks", "4"),
    _rows("sharding8", "benchmarks/sharding/run.py", ["fits zero", "fits plain"], "--ranks", "8"),
    _rows("recompute", "benchmarks/recompute/run.py", RECOMPUTE, least=180.0),
    _peers("peers-profiles", "profiles", _profiles_state),
    _peers("peers-plans", "plans", _plans_state, offline=True),
    _peers("peers", "rows", _peers_state),
    _rows(
        "tinyllama",
        "benchmarks/tinyllama/run.py",
        [
            "torch fp32 compiled Schedule1F1B ourcut",
            "torch bf16 compiled Schedule1F1B",
            "torch fp32 compiled Schedule1F1B",
            "torch bf16 eager ScheduleZBVZeroBubble",
            "ours bf16 eager nccl",
            "ours bf16-mixed compiled auto",
        ],
        least=150.0,
        tiny=["torch bf16 eager ScheduleZBVZeroBubble", "ours bf16 eager nccl"],  # to compile takes minutes there
    ),
)
"""in the order in which they are worth their time"""


def run_part(part: Part, runs: Runs, left: float) -> dict[str, Any]:
    """Run a part within the time left; what it said is in its log, and what came of it is returned."""
    words = [sys.executable, *part.command(runs, left)]
    paths = [str(ROOT / "src"), str(ROOT / "tests" / "helpers"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    begun = time.monotonic()
    with (runs.of(part.name) / "runs.log").open("a", encoding="utf-8") as log:
        print("$", *words, file=log, flush=True)
        process = subprocess.Popen(
            words, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True
        )
        try:
            code: int | str = process.wait(timeout=left)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGTERM)  # which programs on slices clean up at
            try:
                process.wait(timeout=MARGIN)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            code = "ended by the clock"
    return {"seconds": round(time.monotonic() - begun, 1), "exit": code}


def summary_of(runs: Runs, calls: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """All parts: what is done, and in which calls."""
    found = {}
    for part in PARTS:
        done, wanted, words = part.state(runs)
        found[part.name] = {
            "done": done,
            "of": wanted,
            "state": "done" if done >= wanted else "begun" if done or calls.get(part.name) else "left",
            "result": words,
            "calls": calls.get(part.name, []),
        }
    return found


def pack(folder: Path, path: Path) -> None:
    """The whole folder as one archive."""
    with tarfile.open(path, "w:gz") as archive:
        archive.add(folder, arcname=".")
    size = path.stat().st_size
    print(
        f"packed {folder} as {path}, {size / 2**20:.1f} MiB{'' if size < LIMIT else '; that is much'}", flush=True
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--budget", type=float, default=3600.0, help="seconds")
    parser.add_argument("--parts", default="", help="words, separated by commas: parts that have one of them")
    parser.add_argument("--list", action="store_true", help="say what is done, and run nothing")
    parser.add_argument("--offline", action="store_true", help="run what needs no GPU, and nothing else")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal on two CPU ranks")
    parser.add_argument("--pack", type=Path, help="write the folder to this archive at the end")
    parser.add_argument("--unpack", type=Path, help="begin with the folder as this archive has it")
    given = parser.parse_args()
    end = time.monotonic() + given.budget
    runs = Runs(folder=given.folder.resolve(), tiny=given.tiny)
    runs.folder.mkdir(parents=True, exist_ok=True)
    if given.unpack is not None:
        with tarfile.open(given.unpack) as archive:
            archive.extractall(runs.folder, filter="data")
    summary = runs.folder / "summary.json"
    known = _json(summary) or {}
    calls = {name: own["calls"] for name, own in known.items()}
    for part in PARTS if not given.list else ():
        done, wanted, _ = part.state(runs)
        if done >= wanted or not any(word in part.name for word in given.parts.split(",")):
            continue
        if part.offline != given.offline and not given.tiny:
            continue
        left = end - time.monotonic() - MARGIN
        if left < part.least:
            print(f"{part.name}: no time left", flush=True)
            continue
        print(f"[{left:5.0f} s left] {part.name}: {done} of {wanted}", flush=True)
        calls.setdefault(part.name, []).append(run_part(part, runs, left))
        summary.write_text(json.dumps(summary_of(runs, calls), indent=1) + "\n", encoding="utf-8")
        print(f"    {calls[part.name][-1]} {part.state(runs)[2]}", flush=True)
    found = summary_of(runs, calls)
    summary.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    for name, own in found.items():
        print(f"{name:22} {own['state']:6} {own['done']} of {own['of']}: {own['result']}", flush=True)
    if given.pack is not None:
        pack(runs.folder, given.pack)


if __name__ == "__main__":
    main()
