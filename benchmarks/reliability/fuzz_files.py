"""Mutates valid documents of every format and runs every command that reads them. README.md says what must hold.

python benchmarks/reliability/fuzz_files.py --count 200000 --seed 1
"""

from __future__ import annotations

import copy
import random
from functools import cache
from typing import Any

from fuzz_campaign import Worker, encoded, site_of
from fuzz_documents import Document, companions, documents, signed_manifest, with_hash_of
from fuzz_jobs import Program, run_campaign
from fuzz_lines import COMMANDS
from fuzz_mutations import at, mutated_bytes, mutated_values, places

__all__ = ["file_case"]

WEIGHTS = {
    "plan": 32, "run": 22, "profile": 14, "cluster": 10, "schedule": 10, "schedule table": 4, "layers": 5,
    "graph": 3, "trace": 6, "layout": 2, "manifest": 5,
}  # fmt: skip


@cache
def _beside() -> dict[str, bytes]:
    found = {name: text.encode() for name, text in companions().items()}
    return {**found, "other.json": found["profile.json"]}


def _mutated(seed: int, number: int) -> tuple[str, Document, Any, bytes, random.Random]:
    """Format, document, the values it was changed to (None: only its bytes were), and what the file holds."""
    random_ = random.Random(f"{seed}/{number}")
    kind = random_.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
    document = random_.choice(documents()[kind])
    if document.values is None or random_.random() < 0.08:
        return kind, document, None, mutated_bytes(document.text.encode(), random_), random_
    donor = random_.choice(documents()[kind])
    values = mutated_values(document.values, random_, donor.values)
    return kind, document, values, _bytes(document.written(values)), random_


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", errors="surrogatepass")


def _case(kind: str, document: Document, data: bytes, lines: Any) -> dict[str, Any]:
    own = {name: text.encode() for name, text in document.beside.items()}
    if kind == "plan" and "run.json" in own:
        own["run.json"] = with_hash_of(document.beside["run.json"], data).encode()
    files = {
        name: text
        for name, text in {**_beside(), **own}.items()
        if name in document.beside or any(name in line for line in lines)
    }
    if kind == "manifest" and len(data) % 4:
        data = signed_manifest(data.decode(errors="replace")).encode()
    return {
        "files": encoded({**files, document.file: data}),
        "lines": [list(line) for line in lines],
        "reads": [kind, document.file],
    }


def file_case(seed: int, number: int) -> tuple[str, dict[str, Any]]:
    """The case of a number: its format, and what a worker runs.

    One case in ten runs every command that reads the format, the others two that are drawn.
    """
    kind, document, _, data, random_ = _mutated(seed, number)
    lines = list(COMMANDS[kind])
    random_.shuffle(lines)
    lines = lines if random_.random() < 0.1 else lines[:2]
    return kind, _case(kind, document, data, lines)


def _shrunk(seed: int, number: int, case: dict[str, Any], site: str, worker: Worker) -> dict[str, Any]:
    """Fewer differences from the valid document, as long as it fails at the same site."""
    kind, document, values, data, _ = _mutated(seed, number)
    failing = worker.run(case).get("line", case["lines"][0])
    small = {"document": document.name, "line": failing, "text": data[:20_000].decode(errors="replace")}
    if values is None:
        return small

    def fails(tried: Any) -> bool:
        found = worker.run(_case(kind, document, _bytes(document.written(tried)), [failing]))
        return found["wrong"] is not None and site_of(found) == site

    tries = 0
    for path in sorted((path for paths in places(values).values() for path in paths), key=len):
        if tries > 300:
            break
        try:
            theirs, ours = at(document.values, path), at(values, path)
        except (KeyError, IndexError, TypeError):
            continue
        if repr(theirs) == repr(ours):
            continue
        again = copy.deepcopy(values)
        at(again, path[:-1])[path[-1]] = copy.deepcopy(theirs)
        tries += 1
        if fails(again):
            values = again
    different = {}
    for path in (path for paths in places(values).values() for path in paths):
        try:
            theirs = at(document.values, path)
        except (KeyError, IndexError, TypeError):
            theirs = "nothing"
        ours = at(values, path)
        if repr(theirs) != repr(ours) and len(repr(ours)) < 200:
            different["/".join(map(str, path))] = [repr(theirs)[:200], repr(ours)]
    return {**small, "text": document.written(values)[:20_000], "differs": different}


def main() -> None:
    run_campaign(
        __doc__,
        Program(part="mutated files", count=200_000, block=100, case=file_case, shrink=_shrunk),
    )


if __name__ == "__main__":
    main()
