"""The figures of the campaigns, from their results; `scripts/figures` puts them into the pages."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["rendered"]

HERE = Path(__file__).resolve().parent


def _result(name: str) -> dict[str, Any] | None:
    path = HERE / name
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def _machine(environment: dict[str, Any]) -> str:
    gpu = f", {environment['gpu']}" if "gpu" in environment else ""
    return f"{environment['cores']} cores of {environment['cpu']}{gpu}, torch {environment['torch']}"


def _model_check(found: dict[str, Any]) -> Iterator[str]:
    yield "### Model check"
    yield ""
    yield "| orders | of them | deadlock | verdicts compared | different |"
    yield "|---|---|---|---|---|"
    for name, part in found["parts"].items():
        yield f"| {name} | {part['orders']} | {part.get('deadlocks', 0)} | {part['comparisons']} | 0 |"
    yield (
        f"| all | {found['orders']} | {found['deadlocks']} | {found['comparisons']} | {len(found['different'])} |"
    )
    other = {key: sum(part.get(key, 0) for part in found["parts"].values()) for key in (
        "verdicts of other bounds", "deadlocks of other bounds", "orders explored whole")}  # fmt: skip
    old = found["different_where_sends_are_said_never_to_block"]
    yield ""
    yield (
        f"Seeds {found['seeds'][0]} to {found['seeds'][1]}. Of the verdicts {other['verdicts of other bounds']} "
        f"are of other bounds than the runtime's, {other['deadlocks of other bounds']} of them deadlocks. "
        f"{other['orders explored whole']} pairs of an order and a transport were explored in all interleavings, "
        f"{found['states_explored']} states; each has one end. A checker that says that sends never block is "
        f"found out by {len(old)} verdicts on the known deadlock with 2 to 11 micro-batches."
    )


def _faults(found: dict[str, Any], title: str) -> Iterator[str]:
    yield f"### {title}"
    yield ""
    yield f"{found['faults']} faults, seed {found['settings']['seed']}; {_machine(found['environment'])}."
    yield ""
    yield "| fault | runs | held | longest time from the fault to the end |"
    yield "|---|---|---|---|"
    for how, count in found["by_how"].items():
        held = sum(row["how"] == how and not row["problems"] for row in found["rows"])
        longest = found["longest_seconds_after_fault"].get(how)
        yield f"| {how} | {count} | {held} | {'the run goes on' if longest is None else f'{longest:.1f} s'} |"
    yield f"| all | {found['faults']} | {found['held']} | {found['hung']} hung |"
    yield ""
    for key, label in (("by_place", "Places"), ("by_schedule", "Schedules"), ("by_transport", "Transports")):
        yield f"{label}: {', '.join(f'{name} {count}' for name, count in found[key].items())}."
        yield ""
    broken = [row for row in found["rows"] if row["problems"]]
    if broken:
        yield "What did not hold:"
        yield ""
        yield from (f"- `{row['name']}`: {'; '.join(row['problems'])[:200]}" for row in broken)
        yield ""


def _soak(found: dict[str, Any], title: str) -> Iterator[str]:
    settings = found["settings"]
    yield f"### {title}"
    yield ""
    yield (
        f"{settings['steps']} steps of {settings['schedule']} in {found['seconds']:g} s, {found['checkpoints']} "
        f"checkpoints, {found['evaluations']} evaluations; {_machine(found['environment'])}."
    )
    yield ""
    yield "| rank | resident memory | descriptors | threads |"
    yield "|---|---|---|---|"
    for rank, grown in enumerate(found["growth"]):
        yield (
            f"| {rank} | {grown['resident'] / 1024:+.0f} KiB | {grown['descriptors']:+g} | {grown['threads']:+g} |"
        )
    yield ""
    yield (
        f"Of {settings['steps']} losses {found['losses_equal_to_the_bit']} are those of one process to the bit; "
        f"the largest relative difference is {found['loss_difference']:.1e}."
    )


def _pipedream(found: dict[str, Any]) -> Iterator[str]:
    yield "### PipeDream, again and again"
    yield ""
    yield (
        f"{found['runs']} runs of {found['steps']} steps of a small VGG-16 on {found['device']}, {found['jobs']} "
        f"at once: {len(found['failed'])} failed; {_machine(found['environment'])}."
    )
    for row in found["failed"]:
        yield f"- exit {row['exit']}: `{(row['said'].strip() or 'nothing said').splitlines()[-1][:200]}`"


def _fuzz(found: dict[str, Any]) -> Iterator[str]:
    slow, large = "slowest command, seconds of CPU time", "largest resident memory of a worker, bytes"
    yield "### Malformed files and command lines"
    yield ""
    yield "| campaign | code | seed | cases | commands | exit 0 | 1 | 2 | others | slowest | largest worker |"
    yield "|---|---|---|---|---|---|---|---|---|---|---|"
    notes = []
    for part, wanted in (("mutated files", 200_000), ("command lines", 5000)):
        entries = found.get(part, [])
        for entry in entries:
            exits = entry["exit codes"]
            codes = [exits.get(code, 0) for code in ("0", "1", "2")]
            others = sum(exits.values()) - sum(codes)
            yield (
                f"| {part} | `{entry['code'][:8]}` | {entry['seed']} | {entry['cases']:,} | "
                f"{entry['commands run']:,} | {codes[0]:,} | {codes[1]:,} | {codes[2]:,} | {others} | "
                f"{entry[slow]:.1f} s | {entry[large] / 1e6:.0f} MB |"
            )
        cases, failed = (sum(entry[key] for entry in entries) for key in ("cases", "failed cases"))
        left = sum(len(entry["failures"]) for entry in entries)
        mended = sorted({site for entry in entries for site in entry["mended"]})
        notes.append(
            f"Of {wanted:,} {part} {cases:,} were run; {failed} failed then, {left} of them still do."
            + (f" Mended since: {'; '.join(f'`{site.strip()}`' for site in mended)}." if mended else "")
        )
    yield ""
    yield " ".join(notes)


def rendered() -> str:
    """All figures there are, as Markdown."""
    parts = []
    for name, make in (
        ("result-fuzz.json", _fuzz),
        ("result-model-check.json", _model_check),
        ("result-faults.json", lambda found: _faults(found, "Faults, CPU ranks over gloo")),
        ("result-faults-slices.json", lambda found: _faults(found, "Faults, slices of a GPU over NCCL and IPC")),
        ("result-soak.json", lambda found: _soak(found, "Soak, CPU ranks")),
        ("result-soak-slices.json", lambda found: _soak(found, "Soak, slices of a GPU")),
        ("result-pipedream.json", _pipedream),
    ):
        found = _result(name)
        if found is not None:
            parts.append("\n".join(make(found)).strip())
    return "\n\n".join(parts)
