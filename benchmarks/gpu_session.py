"""Everything that needs a GPU, in the order of its worth, within a time: each part is a command of its own.

    gpu_session.py --folder WORK --budget 560 --pack work.tar.gz      on a GPU
    gpu_session.py --folder WORK --offline                            what needs none: plans, from the profiles
    gpu_session.py --folder WORK --list                               what is done, and what is left
    gpu_session.py --folder WORK --tiny                               a rehearsal on two CPU ranks

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
sys.path.insert(0, str(ROOT / "benchmarks" / "peers_training"))
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
class Session:
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


State = Callable[[Session], tuple[int, int, str]]
"""how much is done, of how much, and what came of it"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One command, in as many calls as it takes."""

    name: str
    least: float
    """seconds left without which it is not begun"""
    command: Callable[[Session, float], Sequence[str]]
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

    def command(session: Session, left: float) -> list[str]:  # noqa: ARG001
        junit = session.of(name) / "junit.xml"
        chosen = f"tests/gpu/{file}.py"
        return ["-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", chosen, f"--junitxml={junit}"]

    def state(session: Session) -> tuple[int, int, str]:
        junit = session.of(name) / "junit.xml"
        if not junit.exists():
            return 0, 1, "not run"
        suite = ElementTree.parse(junit).getroot().find("testsuite")
        assert suite is not None
        counts = {key: int(suite.get(key, "0")) for key in ("tests", "failures", "errors", "skipped")}
        return 1, 1, ", ".join(f"{count} {key}" for key, count in counts.items())

    return Part(name=name, least=60.0, command=command, state=state)


def _soak_command(session: Session, left: float) -> list[str]:
    folder = session.of("soak")
    words = ["benchmarks/reliability/soak.py", *session.on_slices, "--seconds", f"{left - MARGIN:.0f}"]
    words += ["--work", str(folder / "work"), "--out", str(folder / "result.json")]
    return [*words, *(["--steps", "100"] if session.tiny else [])]


def _soak_state(session: Session) -> tuple[int, int, str]:
    found = _json(session.of("soak") / "result.json")
    if found is None:
        return 0, 1, "not done"
    return 1, 1, "; ".join(found["problems"]) or f"{found['settings']['steps']} steps, flat and equal"


def _faults_known(session: Session) -> list[dict[str, Any]]:
    found = _json(session.of("faults") / "result.json")
    return [] if found is None else list(found["rows"])


def _faults_wanted(session: Session) -> int:
    return 2 if session.tiny else FAULTS


def _faults_command(session: Session, left: float) -> list[str]:
    words = ["benchmarks/reliability/faults.py", *session.on_slices, "--jobs", "1" if session.tiny else "4"]
    words += ["--minutes", f"{max(0.5, (left - 60) / 60):.2f}", "--out", str(session.of("faults") / "result.json")]
    return [*words, "--limit", str(_faults_wanted(session) - len(_faults_known(session)))]


def _faults_state(session: Session) -> tuple[int, int, str]:
    rows = _faults_known(session)
    held = sum(not row["problems"] for row in rows)
    return len(rows), _faults_wanted(session), f"{held} of {len(rows)} held"


def _pipedream_command(session: Session, left: float) -> list[str]:
    times, jobs = ("2", "1") if session.tiny else (str(PIPEDREAM), "6")
    words = ["benchmarks/reliability/pipedream_runs.py", "--times", times, "--jobs", jobs]
    words += ["--device", "cpu" if session.tiny else "cuda", "--seconds", f"{left - MARGIN:.0f}"]
    return [*words, "--out", str(session.of("pipedream") / "result.json")]


def _pipedream_state(session: Session) -> tuple[int, int, str]:
    found = _json(session.of("pipedream") / "result.json") or {"runs": 0, "failed": []}
    return found["runs"], 2 if session.tiny else PIPEDREAM, f"{len(found['failed'])} of {found['runs']} failed"


def _rows(
    name: str, program: str, rows: Sequence[str], *options: str, least: float = 120.0, tiny: Sequence[str] = ()
) -> Part:
    """Rows of a benchmark that keeps them by name in result.json of its folder; a rehearsal may run fewer."""

    def wanted(session: Session) -> Sequence[str]:
        return tiny if session.tiny and tiny else rows

    def command(session: Session, left: float) -> list[str]:
        words = [program, "--folder", str(session.of(name)), "--budget", f"{left - MARGIN:.0f}", *options]
        return [*words, "--rows", ",".join(wanted(session)), *(["--tiny"] if session.tiny else [])]

    def state(session: Session) -> tuple[int, int, str]:
        known = _json(session.of(name) / "result.json") or {}
        done = [row for row in wanted(session) if row in known]
        failed = [row for row in done if "error" in known[row]]
        return len(done), len(wanted(session)), f"failed: {', '.join(failed)}" if failed else f"{len(done)} rows"

    return Part(name=name, least=least, command=command, state=state)


TINY_PEERS = "vgg16 fp32 eager 4"
"""rows of peers_training that a rehearsal runs"""


def _peers(
    name: str, until: str, state: Callable[[Session], tuple[int, int, str]], *, offline: bool = False
) -> Part:
    """peers_training, as far as that; all in one folder."""

    def command(session: Session, left: float) -> list[str]:
        words = ["benchmarks/peers_training/run.py", "--folder", str(session.of("peers")), "--until", until]
        words += ["--budget", f"{left - MARGIN:.0f}"]
        return [*words, *(["--tiny", "--rows", TINY_PEERS] if session.tiny else [])]

    return Part(name=name, least=130.0, command=command, state=state, offline=offline)


def _settings(session: Session) -> list[Any]:
    from contenders import SETTINGS

    return [own for own in SETTINGS if not session.tiny or own.name == TINY_PEERS]


def _profiles_state(session: Session) -> tuple[int, int, str]:
    from run import Rows

    work = Rows(session.of("peers"), tiny=session.tiny, budget=0.0)
    missing = [own.name for own in _settings(session) if not work.is_known(own)]
    wanted = len(_settings(session))
    return wanted - len(missing), wanted, f"missing: {', '.join(missing)}" if missing else "all are known"


def _plans_state(session: Session) -> tuple[int, int, str]:
    """Of every setting whose profile is known the automatic plan, or why there is none."""
    from run import Rows

    work = Rows(session.of("peers"), tiny=session.tiny, budget=0.0)
    known = [own for own in _settings(session) if work.is_known(own)]
    done = [own for own in known if work.is_planned(own)]
    return len(done), len(known), f"{len(done)} settings planned"


def _peers_state(session: Session) -> tuple[int, int, str]:
    from contenders import row_names

    known = _json(session.of("peers") / "rows.json") or {}
    wanted = [row for row in row_names() if not session.tiny or row.startswith(TINY_PEERS)]
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


def run_part(part: Part, session: Session, left: float) -> dict[str, Any]:
    """Run a part within the time left; what it said is in its log, and what came of it is returned."""
    words = [sys.executable, *part.command(session, left)]
    paths = [str(ROOT / "src"), str(ROOT / "tests" / "helpers"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    begun = time.monotonic()
    with (session.of(part.name) / "session.log").open("a", encoding="utf-8") as log:
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


def told(session: Session, calls: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """All parts: what is done, and in which calls."""
    found = {}
    for part in PARTS:
        done, wanted, words = part.state(session)
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
    session = Session(folder=given.folder.resolve(), tiny=given.tiny)
    session.folder.mkdir(parents=True, exist_ok=True)
    if given.unpack is not None:
        with tarfile.open(given.unpack) as archive:
            archive.extractall(session.folder, filter="data")
    summary = session.folder / "summary.json"
    known = _json(summary) or {}
    calls = {name: own["calls"] for name, own in known.items()}
    for part in PARTS if not given.list else ():
        done, wanted, _ = part.state(session)
        if done >= wanted or not any(word in part.name for word in given.parts.split(",")):
            continue
        if part.offline != given.offline and not given.tiny:
            continue
        left = end - time.monotonic() - MARGIN
        if left < part.least:
            print(f"{part.name}: no time left", flush=True)
            continue
        print(f"[{left:5.0f} s left] {part.name}: {done} of {wanted}", flush=True)
        calls.setdefault(part.name, []).append(run_part(part, session, left))
        summary.write_text(json.dumps(told(session, calls), indent=1) + "\n", encoding="utf-8")
        print(f"    {calls[part.name][-1]} {part.state(session)[2]}", flush=True)
    found = told(session, calls)
    summary.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    for name, own in found.items():
        print(f"{name:22} {own['state']:6} {own['done']} of {own['of']}: {own['result']}", flush=True)
    if given.pack is not None:
        pack(session.folder, given.pack)


if __name__ == "__main__":
    main()
