"""From nothing to a plan of one's own model, by README's own commands, timed; README.md here says what is claimed.

    python3 benchmarks/first_plan/run.py

A fresh clone goes into a temporary folder, the model of README's section "Start" into a file there, and the
commands of that section are typed into one shell, in an environment without caches of pip and BaPipe. Needs the
standard library alone. Writes result.json beside itself, and fails if a claim does.
"""

from __future__ import annotations

import itertools
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
MOST_SECONDS = 300.0
MOST_COMMANDS = 4
_OURS = ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONDONTWRITEBYTECODE", "COLUMNS")
"""variables that a newcomer's shell does not have"""


def start_section(readme: str) -> tuple[list[str], str]:
    """The commands of README's section "Start", in order, and the model's file that it shows."""
    section = readme.split("\n## Start\n", 1)[1].split("\n## ", 1)[0]
    commands: list[str] = []
    model = ""
    for kind, text in re.findall(r"^```(\w*)\n(.*?)^```$", section, flags=re.MULTILINE | re.DOTALL):
        if kind == "python":
            model += text
        else:
            commands += [line for line in text.splitlines() if line.strip()]
    return commands, model


def timed(commands: list[str], folder: Path, environment: dict[str, str]) -> list[dict[str, Any]]:
    """Type the commands into one shell; seconds of each, as the shell's clock has them. Raises if one fails."""
    times = folder.parent / "times"
    lines = ["set -e"]
    for number, command in enumerate(commands):
        lines += [
            f"echo {shlex.quote('$ ' + command)} >&2",
            f'echo "{number} $EPOCHREALTIME" >> {shlex.quote(str(times))}',
            command,
        ]
    lines.append(f'echo "{len(commands)} $EPOCHREALTIME" >> {shlex.quote(str(times))}')
    subprocess.run(["bash", "-c", "\n".join(lines)], cwd=folder, env=environment, check=True)
    stamps = [float(line.split()[1]) for line in times.read_text().splitlines()]
    spent = [after - before for before, after in itertools.pairwise(stamps)]
    return [
        {"command": command, "seconds": round(seconds, 1)}
        for command, seconds in zip(commands, spent, strict=True)
    ]


def clean_environment(folder: Path) -> dict[str, str]:
    """This one without what belongs to a checkout, with caches and temporary files in the folder."""
    kept = {name: value for name, value in os.environ.items() if name not in _OURS and "BAPIPE" not in name}
    cache = str(folder / "cache")
    return {**kept, "PIP_NO_CACHE_DIR": "1", "BAPIPE_CACHE": cache, "XDG_CACHE_HOME": cache}


def machine(python: Path) -> dict[str, object]:
    """What it was timed on; versions are those of the environment that the commands made."""
    listed = subprocess.run(
        [python, "-c", "import platform, torch, bapipe; "
         "print(platform.python_version(), torch.__version__, bapipe.__version__)"],
        capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    names = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    cpu = next((line.partition(":")[2].strip() for line in names if line.startswith("model name")), "")
    return {
        "cpu": cpu or platform.processor(),
        "cores": os.cpu_count(),
        "load_before": round(os.getloadavg()[0], 1),
        "system": f"{platform.system()} {platform.machine()}",
        **dict(zip(("python", "torch", "bapipe"), listed, strict=True)),
    }


def main() -> int:
    commands, model = start_section((REPOSITORY / "README.md").read_text(encoding="utf-8"))
    load = round(os.getloadavg()[0], 1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "bapipe"
        begun = time.monotonic()
        subprocess.run(["git", "clone", "--quiet", f"file://{REPOSITORY}", str(folder)], check=True)
        cloned = time.monotonic() - begun
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, check=True
        ).stdout.strip()
        (folder / "my_model.py").write_text(model, encoding="utf-8")
        rows = timed(commands, folder, clean_environment(Path(name)))
        plan = json.loads((folder / "bapipe-auto" / "plan.json").read_text(encoding="utf-8"))
        page = (folder / "report.html").stat().st_size
        where = machine(folder / ".venv" / "bin" / "python")
    total = sum(row["seconds"] for row in rows)
    result = {
        "environment": {**where, "load_before": load},
        "commit": commit,
        "clone_seconds": round(cloned, 1),
        "commands": rows,
        "seconds": round(total, 1),
        "install_seconds": round(
            sum(row["seconds"] for row in rows if "bapipe" not in row["command"].split()[0]), 1
        ),
        "plan": {
            "model": plan["model"]["ref"],
            "schedule": plan["schedule"]["name"],
            "stages": len(plan["stages"]),
            "seconds_per_global_batch": plan["prediction"]["time"],
        },
        "report_bytes": page,
    }
    (HERE / "result.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1))
    wrong = [
        said
        for said, bad in (
            (f"{total:.0f} s are more than {MOST_SECONDS:.0f}", total > MOST_SECONDS),
            (f"{len(rows)} commands are more than {MOST_COMMANDS}", len(rows) > MOST_COMMANDS),
            (f"the plan is of {plan['model']['ref']}", plan["model"]["ref"] != "my_model:build"),
        )
        if bad
    ]
    for said in wrong:
        print(f"first_plan: {said}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
