"""What the pictures of the documents are made of, so that a test can see that one is out of date.

`scripts/pictures` takes them and records, in docs/images/sources.json, a hash of what each shows. A screenshot is
hashed by its page as people read it: the words, drawings, style and scripts, without the digits that nobody sees.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from bapipe.costs.profile import Profile, read_profile
from bapipe.costs.resolve_model import load_profile
from bapipe.hardware.cluster_file import read_cluster, with_link_bandwidth
from bapipe.planner import Request, explore, make_plan
from bapipe.records.plan import Plan
from bapipe.reporting.html.document import make_subject, page_script, page_style, pictures
from bapipe.reporting.html.sections import sections_html
from paths import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "docs" / "_ext"))

import gallery

__all__ = ["IMAGES", "RECORD", "drawn_pictures", "picture_plan", "picture_sources", "record"]

IMAGES = REPOSITORY / "docs" / "images"
RECORD = IMAGES / "sources.json"
_TRAINED = (
    "examples/digits_pipedream.py",
    "examples/tiny_model.py",
    "examples/tiny-profile.json",
    "src/bapipe/reporting/charts/frame.py",
)
_SERVED = tuple(f"src/bapipe/serve/page/{name}" for name in ("serve.html", "serve.css", "serve.js", "compare.js"))


@cache
def picture_plan() -> tuple[Plan, Profile]:
    """The plan that the screenshots show: GNMT-8 on four V100s over slow links."""
    cluster = with_link_bandwidth(read_cluster("4xv100"), 1.6e9)
    sizes = [2**exponent for exponent in range(8)]
    profile = load_profile("gnmt-8", types=list(cluster.types.values()), microbatches=sizes)
    return make_plan(explore(profile, cluster, Request(global_batch=2048))), profile


def picture_sources() -> dict[str, str]:
    """picture -> hash of what it shows."""
    plan, profile = picture_plan()
    page = re.sub(r' value="[^"]*"', "", sections_html(make_subject(plan, profile=profile)))
    report = [page, page_style(), page_script()]
    return {
        "digits-pipedream.svg": _hash(map(_text, _TRAINED)),
        **{name: _hash([text]) for name, text in drawn_pictures().items()},
        "report.png": _hash(report),
        "serve.png": _hash([*report, *map(_text, _SERVED)]),
    }


@cache
def drawn_pictures() -> dict[str, str]:
    """picture -> the picture itself, of those that a command draws from what is in the repository."""
    profile = read_profile(REPOSITORY / "examples" / "gpt2-profile.json")
    plan = make_plan(explore(profile, read_cluster("2xcpu"), Request(global_batch=16, stages=2)))
    drawn = pictures(make_subject(plan, profile=profile))
    tutorial = {f"tutorial-{name}.svg": drawn[f"{name}.svg"] for name in ("timeline", "balance", "memory")}
    return {**{f"gallery-{name}.svg": gallery.picture(name) for name in gallery.SHOWN}, **tutorial}


def record() -> None:
    """Draw what can be drawn at once, and write down what all pictures show."""
    for name, text in drawn_pictures().items():
        (IMAGES / name).write_text(text, encoding="utf-8")
    RECORD.write_text(json.dumps(picture_sources(), indent=1) + "\n", encoding="utf-8")


def _text(name: str) -> str:
    return Path(REPOSITORY / name).read_text(encoding="utf-8")


def _hash(texts: Iterable[str]) -> str:
    found = hashlib.sha256()
    for text in texts:
        found.update(text.encode())
    return found.hexdigest()


if __name__ == "__main__":
    record()
