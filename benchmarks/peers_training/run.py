"""The one benchmark that decides: models on slices of one GPU, our automatic plan beside torch's ways to train.

    run.py --folder WORK --budget 540 --until profiles     on a GPU
    run.py --folder WORK --until plans                     anywhere, from the profiles
    run.py --folder WORK --budget 540                      on a GPU; goes on where it stopped
    run.py --folder WORK --budget 540 --repeats 3          two more runs of every row
    run.py --folder WORK --budget 540 --at-once 3          settings prepared beside each other, measured by turns
    run.py --folder WORK --tiny                            a rehearsal on two CPU ranks

Every row of a setting has the same global batch, optimizer implementation, precision and 16 GB a slice. Rows are
named in contenders.py; `--rows vit-l,t5` runs those with one of these words, and a row's whole name that row.
A row that fails is a row, too.
WORK/rows.json has all that was measured and WORK/result.json the rows and the summary.
"""

from __future__ import annotations

import importlib.util
import json
import platform
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
for _folder in (HERE, HERE.parent / "tinyllama"):
    sys.path.insert(0, str(_folder))

from contenders import CUTS, SETTINGS, Contender, Setting, other_families, row_names  # noqa: E402
from plans import equal_stages, of_plan  # noqa: E402
from side_by_side import run_beside  # noqa: E402
from summary import result_of  # noqa: E402
from work import ROOT, Work, row_options  # noqa: E402

from bapipe.errors import BaPipeError  # noqa: E402
from bapipe.io.files import write_text  # noqa: E402
from bapipe.records.plan import read_plan, write_plan  # noqa: E402
from models import MODELS  # noqa: E402

LEAST = {"profile": 110.0, "launch": 60.0}
"""seconds left without which none is begun"""
WARM, TIMED = 1, 4
"""steps of a peer, and how many come before that are not timed"""
PATIENCE = 75.0
"""seconds after which a peer that is not done is given up"""
WAITING = 240.0
"""the same where others measure by turns"""
ALTERNATIVES = {"second": 0, "third": 1}


class Rows(Work):
    """The rows of this benchmark, launch by launch."""

    def __init__(
        self,
        folder: Path,
        *,
        tiny: bool,
        budget: float,
        words: str = "",
        turn: Path | None = None,
        shared: Path | None = None,
        cut_already: bool = False,
    ) -> None:
        """`turn`: a file by which processes like this one measure one after another, on slices that are cut
        already; `shared`: where their profiles and links are."""
        super().__init__(folder, HERE, tiny=tiny, budget=budget, cut_already=cut_already or turn is not None)
        self.turn, self.shared = turn, (shared or folder).resolve()
        self.environment["PYTHONPATH"] += f":{HERE.parent / 'tinyllama'}"
        self.words = words.split(",")
        self._cut: str | None = None
        """how the GPU is cut now"""
        path = self.folder / "rows.json"
        self.rows: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    # --- what is known of a setting before it runs

    def cut(self, word: str) -> None:
        """Cut the GPU so, unless it is."""
        if self.tiny or self._cut == word:
            return
        if self.cut_already:
            self.ranks = len(CUTS[word])
            return
        shares = ",".join(f"{share:g}" for share in CUTS[word].percentages)
        self.bapipe("slices", "start", "--percentages", shares, "--memory", self.memory)
        self._cut, self.ranks = word, len(CUTS[word])

    def kept(self, name: str) -> Path | None:
        """A file of this name in the work folder or among those that are committed."""
        found = [self.shared / name, *([] if self.tiny else [HERE / "profiles" / name])]
        return next((path for path in found if path.exists()), None)

    def profile(self, setting: Setting) -> Path:
        """Measured on a slice with the others loaded, unless that is known; for unequal slices of both kinds."""
        name = f"profile-{setting.stem}.json"
        known = self.kept(name)
        if known is None and setting.how == "eager" and self.committed(setting).exists() and not self.tiny:
            return self.committed(setting)
        if known is None and setting.slices == "unequal":
            parts = [str(self.profile(replace(setting, slices=word))) for word in ("4", "8")]
            self.bapipe("merge", *dict.fromkeys(parts), "--replace", "-o", str(self.shared / name))
            return self.shared / name
        if known is None:
            self.measure_profile(setting, self.shared / name)
        return known or self.shared / name

    def is_known(self, setting: Setting) -> bool:
        """Whether there is a profile of it, or rows that failed for want of one, and links."""
        words = ("4", "8") if setting.slices == "unequal" else (setting.slices,)
        parts = [replace(setting, slices=word) for word in words]
        links = [self.kept(f"cluster-{setting.slices}-{transport}.toml") for transport in ("nccl", "auto")]
        before = setting.how == "eager" and not self.tiny and self.committed(setting).exists()
        measured = before or all(self.kept(f"profile-{own.stem}.json") for own in parts)
        failed = "error" in self.rows.get(f"{setting.name} torch ddp", {})
        return None not in links and (measured or failed)

    def is_planned(self, setting: Setting) -> bool:
        """Whether every contender has its plan, or has failed for want of one."""
        for words, own in setting.contenders().items():
            transport = "auto" if own.launch == "auto" else "nccl"
            equal = "-equal" if own.equal else ""
            plan = (own.plan or "").replace(" ", "-")
            path = self.folder / f"plan-{setting.stem}-{plan}-{transport}{equal}.json"
            if own.plan is not None and not path.exists() and f"{setting.name} {words}" not in self.rows:
                return False
        return True

    def committed(self, setting: Setting) -> Path:
        """A profile of slices of 25 and of 12.5 % that the repository has of the paper's models."""
        return ROOT / "profiles" / "h200" / "with-loss" / f"{MODELS[setting.model].spec}-{setting.precision}.json"

    def measure_profile(self, setting: Setting, path: Path) -> None:
        self.enough("profile", setting.name)
        self.cut(setting.slices)
        about = MODELS[setting.model]
        asked = {**self.asked(setting), "compiled": setting.how == "compiled", "out": str(path)}
        asked["size"] = about.batch(tiny=self.tiny)[0]
        file = self.folder / f"measure-{setting.stem}.json"
        file.write_text(json.dumps(asked), encoding="utf-8")
        self.run(sys.executable, str(HERE / "measure_model.py"), str(file))

    def asked(self, setting: Setting) -> dict[str, Any]:
        """What every process of a setting is told."""
        about = MODELS[setting.model]
        return {
            "spec": about.spec,
            "arguments": [f"{key}={value}" for key, value in about.given(tiny=self.tiny).items()],
            "precision": setting.precision,
            "optimizer": f"{about.optimizer}(fused=true)",
            "device": self.device,
            "turn": None if self.turn is None else str(self.turn),
        }

    def cluster_of(self, setting: Setting, transport: str) -> Path:
        """The slices, with links as that transport has them."""
        name = f"cluster-{setting.slices}"
        known = self.kept(f"{name}-{transport}.toml")
        if known is None:
            self.cut(setting.slices)
        return known or self.cluster(transport, name)

    def plan(self, setting: Setting, which: str, transport: str = "nccl") -> Path:
        """automatic; second or third: the automatic plan's next families; or of that schedule, unreplicated."""
        path = self.folder / f"plan-{setting.stem}-{which.replace(' ', '-')}-{transport}.json"
        if path.exists():
            return path
        about = MODELS[setting.model]
        size, count = about.batch(tiny=self.tiny)
        words = ["plan", str(self.profile(setting)), "--cluster", str(self.cluster_of(setting, transport))]
        words += ["--global-batch", str(size * count), "--micro-batch", str(size)]
        words += ["--optimizer", about.optimizer, "--optimizer-arg", "fused=true"]
        if which in ALTERNATIVES:
            automatic = read_plan(self.plan(setting, "automatic", transport))
            others = other_families(automatic.schedule.name, automatic.alternatives)
            if len(others) <= ALTERNATIVES[which]:
                raise RuntimeError(f"the automatic plan lists {len(others)} other families that fit")
            words += ["--schedule", others[ALTERNATIVES[which]]]
        elif which == "1f1b-so":
            words += ["--schedule", which, "--stages", str(self.width(setting))]
        elif which == "dealt equally":
            words += ["--dealing", "equal"]
        elif which != "automatic":
            words += ["--schedule", which]
        if setting.how == "compiled":
            words += ["--compile"]
        self.bapipe(*words, "--out", str(path))
        return path

    def width(self, setting: Setting) -> int:
        return 2 if self.tiny else len(setting.cut)

    def peer_plan(self, setting: Setting, contender: Contender) -> Path:
        """The plan by which torch's stages are cut."""
        assert contender.plan is not None
        path = self.plan(setting, contender.plan)
        if not contender.equal:
            return path
        equal = path.with_name(path.name.replace(".json", "-equal.json"))
        if not equal.exists():
            write_plan(equal_stages(read_plan(path)), equal)
        return equal

    # --- rows

    def due(self, setting: Setting, launch: str, runs: int) -> dict[str, Contender]:
        """Contenders of a launch that have fewer runs than that and have not failed, by their rows' names."""
        found = {}
        known = row_names()
        for words, contender in setting.contenders().items():
            name = f"{setting.name} {words}"
            row = self.rows.get(name, {})
            wanted = name in self.words or any(word in name for word in self.words if word not in known)
            if contender.launch == launch and wanted and "error" not in row and len(row.get("runs", ())) < runs:
                found[name] = contender
        return found

    def forget_failed(self) -> None:
        """Rows that were asked for and have failed are due again."""
        for name in [name for name, row in self.rows.items() if "error" in row]:
            if any(word in name for word in self.words):
                self.rows[name].pop("error")

    def run_all(self, *, until: str, repeats: int) -> bool:
        """Whether nothing that was asked for is left. What a launch needs is measured and planned before it."""
        try:
            for setting in SETTINGS if until != "rows" else ():
                due = {
                    name: own
                    for launch in ("nccl", "peers", "auto")
                    for name, own in self.due(setting, launch, repeats).items()
                }
                if not due:
                    continue
                if until == "plans" and not self.is_known(setting):
                    print(f"{setting.name}: no profile or no links yet", flush=True)
                    continue
                self.prepare(setting, due, plans=until == "plans")
            for runs in range(1, repeats + 1) if until == "rows" else ():
                for launches in (("none", "nccl", "peers"), ("auto",)):
                    for setting in SETTINGS:
                        for launch in launches:
                            self.run_launch(setting, launch, runs)
        except OutOfTimeError as error:
            print(error, flush=True)
            return False
        finally:
            self.close()
        return True

    def close(self) -> None:
        """Write what is known, and leave no slices behind that were cut here."""
        self.write()
        if self._cut is not None:
            self.stop_slices()
            self._cut = None

    def prepare(self, setting: Setting, due: dict[str, Contender], *, plans: bool) -> None:
        """Profile, links and, if asked, plans of what is due; what cannot be had is a row that failed."""
        for transport in dict.fromkeys("auto" if own.launch == "auto" else "nccl" for own in due.values()):
            self.guarded(setting, "ours", lambda transport=transport: self.cluster_of(setting, transport))
        self.guarded(setting, "", lambda: self.profile(setting))
        for name, contender in due.items() if plans else ():
            if contender.plan is not None and contender.launch != "none":
                words = name.removeprefix(f"{setting.name} ")
                self.guarded(setting, words, lambda own=contender: self.contender_plan(setting, own), exact=True)

    def contender_plan(self, setting: Setting, contender: Contender) -> Path:
        if contender.is_peer:
            return self.peer_plan(setting, contender)
        assert contender.plan is not None
        path = self.plan(setting, contender.plan, contender.launch)
        engine = read_plan(path).engine
        if engine != "bapipe":
            raise RuntimeError(f"the plan is torch's own {engine}, which has a row of its own")
        return path

    def guarded(self, setting: Setting, words: str, make: Any, *, exact: bool = False) -> Any:
        """What it makes; where that fails, the rows with these words have failed, and None."""
        try:
            return make()
        except (BaPipeError, RuntimeError, OSError) as error:
            if "no time left" in str(error):
                raise OutOfTimeError("no time left") from None
            for own in setting.contenders():
                if own == words if exact else own.startswith(words):
                    self.rows.setdefault(f"{setting.name} {own}", {"error": str(error)[:300]})
            self.write()
            return None

    def run_launch(self, setting: Setting, launch: str, runs: int) -> None:
        """Run what is due; a peer that fails after others is tried again in processes of its own."""
        due = self.due(setting, launch, runs)
        if launch == "none":
            for name in due:
                there = importlib.util.find_spec("deepspeed") is not None
                why = "takes lists of layers that pass one value on, which these models are not"
                self.rows[name] = {"error": why if there else "deepspeed is not installed"}
            return
        alone: set[str] = set()
        while due:
            self.enough("launch", setting.name)
            self.cut(setting.slices)
            jobs = [job for name, own in due.items() if (job := self.job(setting, name, own)) is not None]
            if not jobs:
                return
            jobs = [job for job in jobs if job["order"] == jobs[0]["order"]][
                : 1 if jobs[0]["row"] in alone else None
            ]
            self.started(setting, launch, jobs)
            for place, job in enumerate(jobs):
                out, failed = Path(job["out"]), Path(job["out"]).with_suffix(".failed")
                if out.exists():
                    self.take(job, json.loads(out.read_text()))
                elif place == 0:
                    why = failed.read_text() if failed.exists() else "it ended without a word"
                    self.take(job, {"error": why[:300]})
                elif failed.exists():
                    alone.add(job["row"])
            due = self.due(setting, launch, runs)

    def job(self, setting: Setting, name: str, contender: Contender) -> dict[str, Any] | None:
        """What a rank is told of a row; None where there is no plan for it."""
        job: dict[str, Any] = {"row": name, "kind": contender.kind, "steps": WARM + TIMED}
        job["out"] = str(self.folder / f"run-{name.replace(' ', '-')}.json")
        job["order"] = list(range(self.width(setting)))
        job["compiled"] = contender.compiles == "always" or (
            contender.compiles == "setting" and setting.how == "compiled"
        )
        if contender.plan is not None:
            words = name.removeprefix(f"{setting.name} ")
            path = self.guarded(setting, words, lambda: self.contender_plan(setting, contender), exact=True)
            if path is None:
                return None
            job |= {"plan": str(path), "schedule": contender.schedule}
            if contender.is_peer:  # the slice of each rank
                job["order"] = [int(own.rpartition("/")[2]) for own in read_plan(path).ranks]
        return job

    def started(self, setting: Setting, launch: str, jobs: list[dict[str, Any]]) -> None:
        """Run a launch to its end, whatever comes of it."""
        about = MODELS[setting.model]
        size, count = about.batch(tiny=self.tiny)
        for job in jobs:
            for suffix in (".json", ".failed"):
                Path(job["out"]).with_suffix(suffix).unlink(missing_ok=True)
        asked = {**self.asked(setting), "jobs": jobs, "code": str(HERE), "limit": self.patience}
        asked |= {"transport": "auto" if self.tiny or launch == "auto" else "nccl", "timeout": self.patience}
        asked |= {"size": size, "count": count, "order": jobs[0]["order"]}
        file = self.folder / f"jobs-{launch}.json"
        file.write_text(json.dumps(asked), encoding="utf-8")
        program = [str(HERE / "our_trials.py"), str(file)]
        if launch == "peers":
            ranks = ["--standalone", "--nproc-per-node", str(len(jobs[0]["order"]))]
            program = ["-m", "torch.distributed.run", *ranks, str(HERE / "peer_ranks.py"), str(file)]
        try:
            self.run(sys.executable, *program, limit=self.patience * (2 + len(jobs)))
        except RuntimeError as error:
            if "no time left" in str(error):
                raise OutOfTimeError("no time left") from None
            print(f"    {error}", flush=True)

    @property
    def patience(self) -> float:
        """Seconds for one job, with its wait for a turn."""
        return 600.0 if self.tiny else PATIENCE if self.turn is None else WAITING

    def take(self, job: dict[str, Any], told: dict[str, Any]) -> None:
        """What a job left becomes a run of its row, or its row has failed."""
        row = self.rows.setdefault(job["row"], {"runs": []})
        if "error" in told:
            row["error"], said = told["error"], told["error"]
        else:
            row["runs"].append(told)
            row |= {"compiled": job["compiled"], **of_plan(job)}
            said = f"{sorted(told['seconds'])[len(told['seconds']) // 2]:.3f} s a step"
        print(f"{job['row']}: {said}", flush=True)
        self.write()

    def enough(self, what: str, name: str) -> None:
        if not self.tiny and self.left < LEAST[what]:
            raise OutOfTimeError(f"{name}: no time left for its {what}")

    def write(self) -> None:
        write_text(self.folder / "rows.json", json.dumps(self.rows, indent=1) + "\n")
        if self.rows:
            found = result_of(self.rows, self.machine(), tiny=self.tiny)
            write_text(self.folder / "result.json", json.dumps(found, indent=1) + "\n")

    def machine(self) -> dict[str, Any]:
        """Where the rows were measured; plans are made elsewhere, too, which says nothing of it."""
        path = self.folder / "environment.json"
        known: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"gpu": None}
        if known["gpu"] is None:
            import torch

            gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
            known = {
                "gpu": None if gpu is None else f"{gpu}, slices of {self.memory} by CUDA MPS",
                "torch": torch.__version__,
                "python": platform.python_version(),
                "date": time.strftime("%Y-%m-%d"),
            }
            path.write_text(json.dumps(known), encoding="utf-8")
        return known

    def row(self, name: str) -> dict[str, Any]:
        return dict(self.rows[name])


class OutOfTimeError(Exception):
    """The budget is spent; what was measured is kept."""


def keep(folder: Path) -> list[str]:
    """Copy profiles, links and the result of a work folder to what is committed; rows of before stay."""
    kept = HERE / "profiles"
    kept.mkdir(exist_ok=True)
    found = sorted([*folder.glob("profile-*.json"), *folder.glob("cluster-*.toml")])
    for path in found:
        shutil.copy(path, kept / path.name)
    result = folder / "result.json"
    if result.exists():
        told, before = (json.loads(path.read_text()) for path in (result, HERE / "result.json"))
        if told.get("rehearsal"):
            raise SystemExit(f"{folder} is of a rehearsal, whose figures mean nothing")
        write_text(HERE / "result.json", json.dumps({**told, "earlier": before["earlier"]}, indent=1) + "\n")
    return [path.name for path in [*found, *([result] if result.exists() else [])]]


def main() -> None:
    parser = row_options(__doc__)
    parser.add_argument("--until", choices=("profiles", "plans", "rows"), default="rows", help="and no further")
    parser.add_argument("--repeats", type=int, default=1, help="runs of every row")
    parser.add_argument("--again", action="store_true", help="forget those of the rows that failed")
    parser.add_argument("--at-once", type=int, default=1, help="settings that are prepared beside each other")
    parser.add_argument("--turn", type=Path, help="file by which runs like this one measure by turns")
    parser.add_argument("--shared", type=Path, help="folder of profiles and links  [default: WORK]")
    parser.add_argument("--keep", action="store_true", help="copy WORK's profiles and result to here, and end")
    given = parser.parse_args()
    if given.keep:
        print("\n".join(keep(given.folder)))
        return
    place = {"turn": given.turn, "shared": given.shared, "cut_already": given.cut_already}
    work = Rows(given.folder, tiny=given.tiny, budget=given.budget, words=given.rows, **place)
    if given.again:
        work.forget_failed()
    if given.at_once > 1:
        done = run_beside(work, given.at_once, until=given.until, repeats=given.repeats)
    else:
        done = work.run_all(until=given.until, repeats=given.repeats)
    print("nothing is left" if done else "the same command goes on", flush=True)


if __name__ == "__main__":
    main()
