"""One fault: the run that it happens to, the run that goes on after it, and how both were."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fault_cases import EVERY, STEPS, TIMEOUT, Fault, make_plan

from bapipe.records.plan import write_plan
from bapipe.torch.launch.shared_memory import left_files

__all__ = ["Command", "Machine", "baseline", "judged_problems", "run_fault"]

HERE = Path(__file__).resolve().parent
FAR_TOO_LONG = 240.0
"""seconds; a command that has not ended by then hangs"""
ENDS = 5.0
"""seconds after the command in which what is left of it must be gone"""
DISK = "1m"
_NOISE = ("The hostname of the client socket", "is ready")
"""of lines on standard error that are not about the run"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Where the runs happen."""

    device: str
    transport: str
    sliced: bool = False
    """whether each rank has a slice of the GPU"""

    @property
    def options(self) -> list[str]:
        return [] if self.device == "cpu" else ["--device", "cuda", "--transport", self.transport]


@dataclass(slots=True)
class Command:
    """What came of one `bapipe run`."""

    code: int | None = None
    """None: it hung and was killed"""
    seconds: float = 0.0
    ended: float = 0.0
    """seconds since the epoch"""
    losses: list[tuple[int, float]] = field(default_factory=list)
    said: list[tuple[float, str]] = field(default_factory=list)
    """lines on standard error, and when they came"""
    left_processes: list[str] = field(default_factory=list)
    left_files: list[str] = field(default_factory=list)


def _processes(marker: str) -> dict[int, str]:
    """Processes that live and were started, however indirectly, with this in their environment."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state = (path / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
            if state not in "ZX" and marker.encode() in (path / "environ").read_bytes():
                found[int(path.name)] = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:120]
    return found


class _Watch:
    """Notes the processes of a run while it lasts."""

    def __init__(self, marker: str) -> None:
        self.seen: set[int] = set()
        self._marker = marker
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def _look(self) -> None:
        while not self._over.wait(0.2):
            self.seen.update(_processes(self._marker))

    def end(self) -> set[int]:
        """All that were seen."""
        self._over.set()
        self._thread.join()
        return self.seen


def run_command(plan: Path, *options: str, machine: Machine, fault: Path | None) -> Command:
    """`bapipe run` of a plan to its end, in a temporary folder of its own."""
    marker = f"BAPIPE_FAULT_RUN={plan.parent}"
    temporary = plan.parent / "temporary"
    temporary.mkdir(exist_ok=True)
    environment = {
        **os.environ,
        "BAPIPE_FAULT_RUN": str(plan.parent),
        "TMPDIR": str(temporary),
        "PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "OMP_NUM_THREADS": "1",
        **({} if fault is None else {"BAPIPE_FAULT": str(fault)}),
    }
    made, begun, watch = Command(), time.time(), _Watch(marker)
    process = subprocess.Popen(
        [sys.executable, "-m", "bapipe", "run", str(plan), "--json", "--steps", str(STEPS), "--timeout",
         f"{TIMEOUT:g}", *machine.options, *options],
        cwd=plan.parent, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    (plan.parent / "launcher").write_text(str(process.pid), encoding="ascii")
    readers = [
        threading.Thread(target=_read, args=item)
        for item in ((process.stdout, _loss_reader(made)), (process.stderr, _line_reader(made)))
    ]
    for reader in readers:
        reader.start()
    try:
        made.code = process.wait(timeout=FAR_TOO_LONG)
    except subprocess.TimeoutExpired:
        made.said.append((time.time(), "hangs: " + "; ".join(_processes(marker).values())))
    made.ended = time.time()
    made.seconds = made.ended - begun
    limit = time.monotonic() + ENDS
    while (left := _processes(marker)) and time.monotonic() < limit and made.code is not None:
        time.sleep(0.1)
    made.left_processes = list(left.values())
    for number in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)
    process.wait()
    for reader in readers:
        reader.join()
    made.left_files = [str(path.relative_to(temporary)) for path in temporary.rglob("*") if not path.is_dir()]
    made.left_files += map(str, left_files(watch.end()))
    return made


def _read(stream: Any, take: Callable[[str], None]) -> None:
    for line in stream:
        take(line.rstrip("\n"))
    stream.close()


def _loss_reader(made: Command) -> Callable[[str], None]:
    def take(line: str) -> None:
        with contextlib.suppress(ValueError):
            row = json.loads(line)
            if "step" in row and "loss" in row:
                made.losses.append((int(row["step"]), float(row["loss"])))

    return take


def _line_reader(made: Command) -> Callable[[str], None]:
    def take(line: str) -> None:
        if line.strip() and not any(noise in line for noise in _NOISE):
            made.said.append((time.time(), line))

    return take


def baseline(schedule: str, folder: Path, machine: Machine) -> dict[int, float]:
    """Every step's loss of a run to which nothing happens; its checkpoints stay in FOLDER/saved."""
    known = folder / "losses.json"
    if not known.exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        write_plan(make_plan(schedule, device=machine.device, sliced=machine.sliced), folder / "plan.json")
        saving = [] if schedule == "pipedream" else _saving(folder / "saved", keep=3)
        done = run_command(folder / "plan.json", *saving, machine=machine, fault=None)
        if done.code != 0 or [step for step, _ in done.losses] != list(range(STEPS)):
            raise SystemExit(f"{schedule} does not run without a fault: {done}")
        known.write_text(json.dumps(dict(done.losses)), encoding="ascii")
    return {int(step): loss for step, loss in json.loads(known.read_text(encoding="ascii")).items()}


def _saving(folder: Path, *, keep: int = 2) -> list[str]:
    return ["--checkpoint", str(folder), "--every", str(EVERY), "--keep", str(keep)]


@contextlib.contextmanager
def _disk(folder: Path, *, mounted: bool) -> Iterator[None]:
    """A small disk of its own, for faults of disks."""
    folder.mkdir(parents=True)
    if mounted:
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "none", str(folder)], check=True)
    try:
        yield
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(folder)], check=True)


def run_fault(
    fault: Fault, folder: Path, machine: Machine, losses: dict[int, float], before: Path
) -> dict[str, Any]:
    """Run it, go on after it, and say what did not hold. `before` has an untouched run of the same schedule."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_plan(make_plan(fault.schedule, device=machine.device, sliced=machine.sliced), folder / "plan.json")
    disk = folder / "disk"
    saved = disk / "saved"
    asked = folder / "fault.json"
    asked.write_text(json.dumps({**asdict(fault), "disk": str(disk)}), encoding="utf-8")
    options = [*(_saving(saved) if fault.saves else []), *(["--restarts", "1"] if fault.restarts else [])]
    with _disk(disk, mounted=fault.on_disk):
        if fault.place == "resume":
            shutil.copytree(before / "saved", saved, ignore=shutil.ignore_patterns(f"step-{STEPS:08d}", ".lock"))
            options.append("--resume")
        first = run_command(folder / "plan.json", *options, machine=machine, fault=asked)
        second = None
        if fault.saves and not fault.restarts and not (first.code == 0 and fault.is_harmless):
            if fault.how == "read-only disk":
                subprocess.run(["umount", str(disk)], check=True)
            (disk / "ballast").unlink(missing_ok=True)
            second = run_command(folder / "plan.json", *_saving(saved), "--resume", machine=machine, fault=asked)
        unfinished = [path.name for path in saved.glob(".partial-*")] if saved.is_dir() else []
    fired = [float(path.read_text(encoding="ascii")) for path in folder.glob("fired")]
    problems = list(judged_problems(fault, first, second, losses, fired=fired, unfinished=unfinished))
    after = None if not fired else _seconds_after(fault, first, min(fired))
    row = {
        **asdict(fault),
        "name": fault.name,
        "code": first.code,
        "line": next((_without_places(line, folder) for _, line in first.said if line.startswith("bapipe: ")), ""),
        "seconds_after_fault": None if after is None else round(after, 2),
        "seconds": round(first.seconds + (0.0 if second is None else second.seconds), 1),
        "problems": problems,
    }
    if problems:
        row["standard_error"] = [_without_places(line, folder) for _, line in first.said][:30]
    else:
        shutil.rmtree(folder)
    return row


def _without_places(line: str, folder: Path) -> str:
    """What was said, without the names of this machine and of its folders."""
    shorter = line.replace(f"{folder.parent}/", "").replace(f"{HERE}/", "")
    return shorter.replace(f" on {socket.gethostname()}", " on HOST")


def _seconds_after(fault: Fault, done: Command, fired: float) -> float | None:
    """From the fault to the end of the attempt that it ended; None where it ended none."""
    if fault.is_harmless or fault.on_disk:
        return None
    if fault.restarts:
        return next((at - fired for at, line in done.said if "; restart 1 of 1, from " in line), None)
    return done.ended - fired


def judged_problems(
    fault: Fault,
    first: Command,
    second: Command | None,
    losses: dict[int, float],
    *,
    fired: list[float],
    unfinished: list[str],
) -> Iterator[str]:
    """What of the contract does not hold; `losses` are those of a run to which nothing happens, `fired` says when
    the fault happened, and `unfinished` what is left in the checkpoint folder."""
    if not fired:
        yield "the fault never happened"
    if first.code is None:
        yield "hangs"
        return
    if fired and (after := _seconds_after(fault, first, min(fired))) is not None and after > fault.bound:
        yield f"ended {after:.1f} s after the fault, over {fault.bound:g} s"
    if first.code != (code := _expected_code(fault)):
        yield f"code {first.code} instead of {code}"
    yield from _wrong_lines(fault, [line for _, line in first.said])
    for which, done in (("", first), ("resumed: ", second)):
        if done is None:
            continue
        yield from (f"{which}process left: {text}" for text in done.left_processes)
        # Who is killed removes nothing; the folder of a launcher goes with the next run.
        excused = "bapipe-run-" if done is first and fault.how == "kill launcher" else "\0"
        yield from (f"{which}file left: {text}" for text in done.left_files if not text.startswith(excused))
        wrong = [step for step, loss in done.losses if losses[step] != loss]
        if wrong:
            yield f"{which}other losses at steps {wrong}"
    if second is not None and second.code != 0:
        yield f"resumed: code {second.code}: {' / '.join(line for _, line in second.said)[:300]}"
    seen = {step for done in (first, second) if done is not None for step, _ in done.losses}
    start = STEPS - EVERY if fault.place == "resume" else 0
    if (fault.saves or fault.restarts) and seen != set(range(start, STEPS)):
        yield f"losses of steps {sorted(seen)} only"
    if unfinished and fault.saves:
        yield f"unfinished checkpoints left: {unfinished}"


def _expected_code(fault: Fault) -> int:
    if fault.is_harmless or fault.restarts:
        return 0
    if fault.how == "kill launcher":
        return -signal.SIGKILL
    return 128 + signal.SIGTERM if fault.how == "terminate launcher" else 1


def _wrong_lines(fault: Fault, said: list[str]) -> Iterator[str]:
    """One line that names the rank, or the launcher's end; beside it the table of a rank that does not answer."""
    if any("Traceback" in line for line in said):
        yield "a traceback"
    own = [line for line in said if line.startswith("bapipe: ")]
    ranks = "|".join(map(str, fault.ranks))
    if fault.how == "kill launcher":
        return
    if fault.on_disk:
        if not any("was not written to" in line for line in said):
            yield "nobody says that a checkpoint was not written"
        return
    if fault.how == "slow":
        if said:
            yield f"{len(said)} lines about what is only slow"
        return
    wanted = {
        "kill": rf"bapipe: rank ({ranks}) on .*: was killed by SIGKILL",
        "stop": rf"bapipe: rank ({ranks}) on .*: (does not answer|was stopped by a signal)",
        "raise": rf"bapipe: rank ({ranks})( on .*)?: (\S+\.)?BrokenLayerError: this rank was asked to fail",
        "terminate launcher": r"bapipe: stopped by SIGTERM",
    }[fault.how]
    if (fault.how, fault.place) == ("raise", "save"):
        # What all ranks write together is rank 0's; its lines begin with its number.
        named = f"(rank ({ranks}): ){'?' if 0 in fault.ranks else ''}"
        if not any(re.search(rf"was not written to \S+: {named}Input/output error", line) for line in said):
            yield "nobody says which rank could not write a checkpoint"
        return
    if len(own) != 1 or not re.match(wanted, own[0]):
        yield f"{len(own)} lines, and none or not this one: {wanted}"
    others = [line for line in said if line not in own]
    table = [line for line in others if re.match(r"\s*(rank\s+stage|\d+ )", line)]
    if len(others) > (len(table) if fault.how == "stop" else 0):
        yield f"{len(others)} lines beside it"
