"""Runs random command lines, made from click's own tables of commands and options. README.md says what must hold.

    python benchmarks/reliability/fuzz_commands.py --count 5000 --seed 1

Commands, options, their types and choices are click's own, and so are the examples in each command's help, which
every third line begins with: a command or an option that is new is tried by itself.

No process is started: a worker refuses it (`fuzz_worker.NoProcesses`), so that commands that would train get as
far as their ranks. `profile` and `auto`, which would measure, are given a model that does not exist, and `serve`
an address that is not this machine's. Clusters have at most 8 accelerators, and the tables of the paper that take
about as long as the limit by themselves are left out. `what-if`, which makes a plan for every point of a sweep and
more between them, and half of the plans are for one schedule and micro-batch size.
"""

from __future__ import annotations

import random
import shlex
from functools import cache
from typing import Any

import click
from fuzz_campaign import Worker, encoded, site_of
from fuzz_documents import EXAMPLES, companions, documents
from fuzz_jobs import Program, run_campaign

from bapipe.cli import COMMANDS, cli
from bapipe.exporters.targets import TARGETS

__all__ = ["command_case"]

INTEGERS = (
    "1", "2", "4", "8", "3", "7", "16", "0", "-1", "64", "1000", "100000", "99999999999999999999", "", "x",
    "1.5",
)  # fmt: skip
FLOATS = ("1", "0.5", "0", "-1", "1e-3", "1e300", "1e999", "nan", "inf", "", "x", "5")
LISTS = (
    "1", "1,2", "3,2,1", "10,20,10,5", "0", "-1", "0.5,0.25", "", ",", "1,,2", "x", "1e308,1e308", "nan",
    "1,2,3,4,5,6,7,8",
)  # fmt: skip
FILES = (
    "plan.json", "run.json", "profile.json", "cluster.toml", "layers.toml", "schedule.json", "schedule.csv",
    "small.graph.txt", "no-code.json", "analytic.json", "trace.json", "layout.args", "saved", "missing.json", ".",
    "", "/dev/null", "x" * 300, "-",
)  # fmt: skip
OUTPUTS = (
    "out.json", "out.html", "out.svg", "out.csv", "out.toml", "missing/out.json", ".", "", "/dev/full",
    "x" * 300,
)  # fmt: skip
TEXTS = (
    "", "x", "[/bold]", "\x1b[31m", "é́🚀", "\udc80", "a b", "-", "--", "%s", "x" * 300, "none", "0", "'",
    "a=b", "=",
)  # fmt: skip
WORDS: dict[str, tuple[str, ...]] = {
    "cluster": (
        "2xv100", "4xv100", "2xa100+2xv100", "1xt4", "8xa100", "2xvcu118", "2xvcu129+2xvcu118", "cluster.toml",
        "0xv100",
        "9999xv100", "2xnothing", "v100", "3xv100+1xt4+1xa100", "2x", "+", "missing.toml",
    ),
    "schedule": (
        "1f1b-sno", "1f1b-so", "1f1b", "gpipe", "zb", "zb-h1", "zb-h2", "interleaved", "1f1b-as", "fbp-as",
        "pipedream",
        "data-parallel", "all", "schedule.json", "schedule.csv", "missing.json", "1f1b-s", "./",
    ),
    "strategy": ("exact", "bapipe", "gpipe", "pipedream", "dp", "torchgpipe", "deepspeed", "best"),
    "optimizer": ("sgd", "momentum", "adam", "adamw", "adamw(fused=true)", "torch.optim:RMSprop", "adm",
        "sgd(", "a(b=c)"),
    "optimizer_arguments": ("fused=true", "momentum=0.9", "x", "=", "master_weights=maybe", "lr=nan"),
    "precision": ("fp32", "tf32", "bf16", "fp16", "bf16-mixed", "fp16-mixed", "fp8", "fp64", "int8"),
    "dtype": ("fp32", "bf16"),
    "memory_limit": ("12GB", "1GB", "1MB", "0", "-1GB", "1e400 GB", "16 GiB", "lots"),
    "slice_memory": ("16GB", "1", "x"),
    "memory": ("16GB", "1", "x"),
    "link_bandwidth": ("1.6GB/s", "0.1GB/s", "250 Gb/s", "0 GB/s", "1e400 GB/s", "1e-300 GB/s", "fast", "5"),
    "layer_error": ("5%", "0.3", "0", "99%", "100%", "-1", "x"),
    "link_error": ("30%", "0.05", "0", "1e308", "nan"),
    "assume": ("allocation=fluid", "allocation=x", "nothing=1", "=", "ddr_efficiency=0.5"),
    "sweeps": ("link=1..2GB/s", "memory=8,16GB", "count=1..4", "board.dsp=4000..16000", "ddr=1..2", "x=1",
        "link=2..1GB/s",
               "link=0..0", "=", "v100.memory=8..16GB"),
    "points": ("1", "2", "3", "0", "-1", "1000000"),
    "slots": ("table", "static", "x"),
    "table": ("table1", "table2", "table5", "table6", "table7", "TABLE1"),
    "head": ("127.0.0.1", "node-a", "a b", ""),
    "device": ("cpu", "cuda", "cuda:0", "cuda:x", "tpu"),
    "accelerator": ("cpu-core", "x", ""),
    "arguments": ("layers=2", "x", "="),
    "layout": ("3,5", "4,4", "plan.json", "layout.args", "schedule.csv", "Et*3|(tt|)*2tL", "2,2,2,2", "0,8", "t|",
               "(((", "Et*99999999|L", "(t|)*99999999", "missing.csv"),
    "cuts": ("4,4", "2,2,2,2", "3,5", "8", "0,8", "x", "Et*3|(tt|)*2tL", "99999999999,1"),
    "to": (*TARGETS, "x", "Megatron"),
    "target_version": ("0.1", "1", "2.13", "99.99", "0.2.1", "x", "-1"),
    "lora": ("r=8", "r=0", "r", "=", "r=8,alpha=16", "r=999999999999"),
    "effort": ("low", "normal", "high", "5", "0", "-1", "nan", "1e308", "x"),
    "accept_changes": ("optimizer", "structure,precision", "all", "x", ","),
    "folder": ("saved", "saved", "saved/step-00000002", "new", ".", "plan.json", "/dev/null", "missing/below"),
    "step": ("2", "1", "-1", "0", "99999999999999999999"),
}  # fmt: skip
"""parameter -> values, valid ones first"""
MODELS = ("alexnet", "vgg16", "gnmt-8", "resnet50", "profile.json", "layers.toml", "small.graph.txt",
        "analytic.json",
          "gpt", "vgg17", "a.b:c", "missing.json", "plan.json")  # fmt: skip
SMALL_MODELS = ("alexnet", "profile.json", "layers.toml", "small.graph.txt", "analytic.json", "missing.json")
NOT_HERE = (
    "no.such.module:build", "nothing", "json:no_such_function", "vgg17", "", "a b:c", "missing.toml",
    "os:getcwd",
)  # fmt: skip
NEVER = {"racing", "links"}
"""options that run a model or measure links whatever else is given"""
MEASURING = ("profile", "auto", "serve", "reproduce", "what-if")
"""commands whose examples measure in this process, wait for a browser, or take as long as the limit"""


@cache
def command_table() -> dict[tuple[str, ...], click.Command]:
    """Every command by its words, those of groups too."""
    found: dict[tuple[str, ...], click.Command] = {}
    context = click.Context(cli)
    for name in COMMANDS:
        command = cli.get_command(context, name)
        if isinstance(command, click.Group):
            found.update({(name, inner): each for inner, each in command.commands.items()})
        elif command is not None:
            found[name,] = command
    return found


@cache
def examples() -> dict[tuple[str, ...], list[list[str]]]:
    """The lines that a command's own help shows, but those of commands that would measure or serve."""
    found: dict[tuple[str, ...], list[list[str]]] = {}
    for words, command in command_table().items():
        shown = (line.strip().rstrip("\\") for line in (command.help or "").splitlines())
        lines = [shlex.split(line)[1:] for line in shown if line.startswith("bapipe ")]
        found[words] = [line for line in lines if tuple(line[: len(words)]) == words and words[0] not in MEASURING]
    return found


@cache
def _files() -> dict[str, str]:
    from bapipe.costs.resolve_model import load_profile
    from bapipe.hardware.cluster_file import read_cluster
    from bapipe.io.files import dump_json

    valid = documents()
    (manifest,) = valid["manifest"]
    analytic = load_profile(
        "alexnet", types=[read_cluster("1xv100").type_of(0)], precision="fp32", microbatches=[1, 2]
    )
    texts = {
        **companions(),
        "layers.toml": valid["layers"][0].text,
        "schedule.json": valid["schedule"][0].text,
        "schedule.csv": valid["schedule table"][0].text,
        "small.graph.txt": valid["graph"][0].text,
        "no-code.json": next(item.text for item in valid["plan"] if item.name == "boards"),
        "analytic.json": dump_json(analytic),
        "other.json": (EXAMPLES / "mixed" / "quarter.json").read_text(),
        manifest.file: manifest.text,
        **manifest.beside,
    }
    return encoded({name: text.encode() for name, text in texts.items()})


def _value(words: tuple[str, ...], parameter: click.Parameter, random_: random.Random) -> str:
    name, kind = parameter.name or "", parameter.type
    if name == "model":
        small = random_.random() < 0.6 or words[0] == "what-if"
        return random_.choice(NOT_HERE if words[0] in ("profile", "auto") else SMALL_MODELS if small else MODELS)
    if name in WORDS:
        listed = WORDS[name]
        return random_.choice(listed[: len(listed) // 2 + 1] if random_.random() < 0.7 else (*listed, *TEXTS))
    if isinstance(kind, click.Choice):
        return random_.choice((*map(str, kind.choices), *map(str, kind.choices), *TEXTS))
    if isinstance(kind, click.Path):
        return _path(words, name, random_)
    if isinstance(kind, (click.IntRange, type(click.INT))):
        return random_.choice(INTEGERS[:8] if random_.random() < 0.7 else INTEGERS)
    if isinstance(kind, type(click.FLOAT)):
        return random_.choice(FLOATS)
    if type(kind).__name__ in ("Numbers", "Counts"):
        return random_.choice(LISTS[:4] if random_.random() < 0.6 else LISTS)
    return random_.choice((*TEXTS, *FILES))


def _path(words: tuple[str, ...], name: str, random_: random.Random) -> str:
    usual = {
        "plan_file": "plan.json", "run_file": "run.json", "profile_file": "profile.json", "profiles": "other.json",
        "profile": "profile.json", "checkpoint": "saved", "results": "run.json", "trace_file": "trace.json",
    }  # fmt: skip
    if name == "profile_file" and words[0] == "calibrate":
        return random_.choice(("analytic.json", "profile.json", "missing.json", "plan.json"))
    if name in usual and random_.random() < 0.75:
        return usual[name]
    return random_.choice(FILES if name in usual else OUTPUTS)


def command_line(seed: int, number: int) -> list[str]:
    """The command line of a number."""
    random_ = random.Random(f"{seed}/command/{number}")
    words = random_.choice(
        [*command_table(), *[("simulate",), ("report",), ("compare",)] * 3, ("plan",), ("plan",)]
    )
    shown = examples()[words]
    line = _changed(words, random_.choice(shown), random_) if shown and random_.random() < 0.3 else None
    line = line or _drawn(words, random_)
    if words == ("launch",) and random_.random() < 0.7:
        line.append("--print")
    if words == ("what-if",) or (words == ("plan",) and random_.random() < 0.5):
        line += (
            f"--schedule {random_.choice(('1f1b-so', 'data-parallel'))} --micro-batch 1 --global-batch 8".split()
        )
    if words == ("serve",):
        line += ["--host", "192.0.2.1"]
    if random_.random() < 0.1:
        spot = random_.randrange(1, len(line) + 1)
        line[spot:spot] = [random_.choice((*TEXTS, "--nothing", "-h", "--json", *line))]
    return line


def _drawn(words: tuple[str, ...], random_: random.Random) -> list[str]:
    """What a command must have, and some of what it may have."""
    line = list(words)
    share = random_.choice((0.1, 0.2, 0.4))
    for parameter in command_table()[words].params:
        if parameter.name in NEVER:
            continue
        if isinstance(parameter, click.Argument):
            count = random_.choice((1, 2, 3)) if parameter.nargs == -1 else 1
            if parameter.required or random_.random() < 0.5:
                line += [_value(words, parameter, random_) for _ in range(count)]
        elif isinstance(parameter, click.Option) and random_.random() < (0.95 if parameter.required else share):
            line += _option(words, parameter, random_)
    return line


def _option(words: tuple[str, ...], option: click.Option, random_: random.Random) -> list[str]:
    name = random_.choice([*option.opts, *option.secondary_opts])
    return [name] if option.is_flag else [name, _value(words, option, random_)]


def _changed(words: tuple[str, ...], shown: list[str], random_: random.Random) -> list[str]:
    """An example with some of its words changed or gone, and an option or two more."""
    line = list(shown)
    for _ in range(random_.choice((0, 1, 1, 2))):
        spot = random_.randrange(len(words), len(line)) if len(line) > len(words) else None
        if spot is None:
            break
        what = random_.randrange(4)
        if what == 0:
            del line[spot]
        elif what == 1:
            line[spot] = random_.choice((*TEXTS, *INTEGERS, *FILES))
        elif what == 2 and line[spot].isdigit():
            line[spot] = random_.choice(INTEGERS)
        else:
            line[spot] = line[spot][: random_.randrange(len(line[spot]) + 1)]
    options = [
        item for item in command_table()[words].params if isinstance(item, click.Option) and item.name not in NEVER
    ]
    for _ in range(random_.choice((0, 1, 2))):
        if options:
            line += _option(words, random_.choice(options), random_)
    return line


def command_case(seed: int, number: int) -> tuple[str, dict[str, Any]]:
    """The case of a number: its command, and what a worker runs."""
    line = command_line(seed, number)
    return line[0], {"files": _files(), "lines": [line]}


def _shrunk(_seed: int, _number: int, case: dict[str, Any], site: str, worker: Worker) -> dict[str, Any]:
    """Fewer words, as long as it fails at the same site."""
    line = case["lines"][0]
    position = len(line) - 1
    while position > 0:
        for count in (2, 1):
            shorter = [*line[:position], *line[position + count :]]
            if len(shorter) == len(line):
                continue
            found = worker.run({**case, "lines": [shorter]})
            if found["wrong"] is not None and site_of(found) == site:
                line = shorter
                break
        position -= 1
    return {"line": line}


def main() -> None:
    run_campaign(
        __doc__,
        Program(part="command lines", count=5_000, block=10, case=command_case, shrink=_shrunk),
    )


if __name__ == "__main__":
    main()
