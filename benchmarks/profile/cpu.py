"""Profiles of the zoo on this machine's CPU and how well they agree with the whole step.

    python benchmarks/profile/cpu.py --out DIR [--threads 1] [--only vgg16,resnet50] [--microbatch 1,4]

Run again it goes on where it stopped. DIR/tables.md holds the result, DIR/result-cpu.json
its figures.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from tables import accuracy_tables, time_rows

from bapipe.costs.profile import write_profile
from bapipe.io.files import dump_json, write_text
from bapipe.torch.profiler import MeasureSettings, profile_model

MODELS = {
    "vgg16": {},
    "resnet50": {},
    "gnmt-8": {"sequence": 10, "vocabulary": 8192},
    "gpt": {"blocks": 4, "width": 256, "sequence": 128},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", default=",".join(MODELS))
    parser.add_argument("--microbatch", default="1,4")
    parser.add_argument("--seconds", type=float, default=0.5, help="per layer, size and round")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    sizes = tuple(int(size) for size in options.microbatch.split(","))
    measured = []
    for name in options.only.split(","):
        begun = time.monotonic()
        settings = MeasureSettings(microbatches=sizes, folder=options.out / "cache", seconds=options.seconds)
        found = profile_model(name, settings=settings, args=MODELS[name], threads=options.threads)
        print(f"{name}: {time.monotonic() - begun:.1f} s", file=sys.stderr, flush=True)
        write_profile(found.profile, options.out / f"{name}.json")
        write_text(options.out / f"{name}.details.json", dump_json(found.measured))
        measured.append(found.measured)
        if not found.complete:
            break
    text = accuracy_tables(measured)
    write_text(options.out / "tables.md", text)
    result = {"environment": str(measured[0].environment), "rows": time_rows(measured)}
    write_text(options.out / "result-cpu.json", dump_json(result))
    print(text)


if __name__ == "__main__":
    main()
