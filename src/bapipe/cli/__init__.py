"""The `bapipe` command. torch is imported only by the commands that run a model."""

from __future__ import annotations

import importlib
import io
import os
import sys

import click

from bapipe import __version__
from bapipe.errors import BaPipeError, nearest

__all__ = ["COMMANDS", "LazyCommands", "cli", "main"]

COMMANDS = {
    "auto": ("bapipe.cli.auto", "auto_command"),
    "calibrate": ("bapipe.cli.auto", "calibrate_command"),
    "checkpoint": ("bapipe.cli.checkpoint", "checkpoint_group"),
    "cluster": ("bapipe.cli.profile", "cluster_group"),
    "compare": ("bapipe.cli.compare", "compare_command"),
    "export": ("bapipe.cli.export", "export_plan_command"),
    "fit": ("bapipe.cli.fit", "fit_command"),
    "import-onnx": ("bapipe.cli.import_onnx", "import_onnx_command"),
    "import-trace": ("bapipe.cli.import_trace", "import_trace_command"),
    "judge": ("bapipe.cli.judge", "judge_command"),
    "launch": ("bapipe.cli.launch", "launch_command"),
    "merge": ("bapipe.cli.profile", "merge_command"),
    "plan": ("bapipe.cli.plan", "plan_command"),
    "profile": ("bapipe.cli.profile", "profile_command"),
    "report": ("bapipe.cli.report", "report_command"),
    "reproduce": ("bapipe.cli.reproduce", "reproduce_command"),
    "run": ("bapipe.cli.run", "run_command"),
    "serve": ("bapipe.cli.serve", "serve_command"),
    "simulate": ("bapipe.cli.simulate", "simulate_command"),
    "slices": ("bapipe.cli.profile", "slices_group"),
    "what-if": ("bapipe.cli.what_if", "what_if_command"),
}
"""name -> module and command; imported when used, so that each starts as fast as it can"""


_EXTRAS = {"torch": "torch", "safetensors": "torch", "starlette": "serve", "uvicorn": "serve"}
"""package -> the extra that brings it"""


_LONGEST_LINE = 4000
"""characters of a complaint"""


class LazyCommands(click.Group):
    """A group whose commands are imported when they are asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in COMMANDS:
            return None
        module, name = COMMANDS[cmd_name]
        command: click.Command = getattr(importlib.import_module(module), name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            raise click.UsageError(f"No such command '{args[0][:60]}'{nearest(args[0], COMMANDS)}", ctx)
        return super().resolve_command(ctx, args)


EXAMPLES = """\b
Examples:
  bapipe plan vgg16 --cluster 4xv100 --global-batch 2048
  bapipe profile vgg16 --device cpu --micro-batch 1,2,4 -o profile.json
  bapipe plan profile.json --cluster cluster.toml --out plan.json
  bapipe run plan.json --steps 3 --check --out run.json
  bapipe compare plan.json run.json
  bapipe simulate 1f1b-so --stages 4 --micro-batches 16 --forward 10 --backward 20 --transfer 5
  bapipe simulate all --stages 4 --micro-batches 16 --forward 10 --backward 20 --transfer 5
"""


@click.group(
    cls=LazyCommands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=EXAMPLES
    + """
\b
Shell completion (bash; for zsh and fish put their names in place of bash):
  eval "$(_BAPIPE_COMPLETE=bash_source bapipe)"
""",
)
@click.version_option(__version__, prog_name="bapipe")
def cli() -> None:
    """Find the fastest way to spread the training of a DNN over your accelerators, see why, and run it."""


def main() -> None:
    """Entry point: a mistake of the user is one line on stderr and exit code 2, one of ours one line and 3."""
    for stream in (sys.stdout, sys.stderr):
        # What a terminal cannot show, or a file name that is no text, must not end the command.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        code = cli.main(standalone_mode=False)
    except click.exceptions.Exit as stop:
        code = stop.exit_code
    except (click.exceptions.Abort, KeyboardInterrupt):
        code = 130
    except click.ClickException as error:
        code = _complain(" ".join(error.format_message().split()).rstrip(".") + _where_help_is(error))
    except BaPipeError as error:
        code = _complain(str(error))
    except MemoryError:
        code = _complain("not enough memory for so many actions; lower --stages or --micro-batches")
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    except Exception as error:
        code = _unexpected(error)
    sys.exit(code if isinstance(code, int) else 0)


def _where_help_is(error: click.ClickException) -> str:
    """What to do about a command line that click refused."""
    if not isinstance(error, click.UsageError) or error.ctx is None:
        return ""
    return f"; {error.ctx.command_path} --help shows what it takes"


def _unexpected(error: Exception) -> int:
    """A package that an extra brings and is not there is the user's to install; all else is our mistake."""
    package = (error.name or "").split(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if package in _EXTRAS:
        return _complain(f"this needs {package}, which is not installed; pip install 'bapipe[{_EXTRAS[package]}]'")
    from bapipe.cli.unexpected import BUG_EXIT, bug_line

    return _complain(bug_line(error), code=BUG_EXIT)


def _complain(text: str, *, code: int = 2) -> int:
    """Print it. Names in it may be a file's: a very long one is cut, and what a terminal would obey is escaped."""
    text = text.rstrip()
    if len(text) > _LONGEST_LINE:
        text = f"{text[: _LONGEST_LINE // 2]} … {text[-_LONGEST_LINE // 4 :]}"
    shown = "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)
    print(f"bapipe: {shown}", file=sys.stderr)
    return code
