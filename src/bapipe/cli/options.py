"""Options that several commands share, and those whose names changed: the old name keeps working without being
shown."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from bapipe.costs.optimizers import optimizer_text
from bapipe.costs.profile_ways import Compiling
from bapipe.errors import BaPipeError
from bapipe.hardware.precision import WORDS
from bapipe.models.builtin import Argument
from bapipe.models.model_spec import HUGGING_FACE, parse_arguments

__all__ = [
    "OLD_NAMES",
    "PRECISION_HELP",
    "CompilingCommand",
    "RenamedOption",
    "compile_option",
    "model_options",
    "optimizer_options",
    "read_model_arguments",
    "read_optimizer",
    "renamed",
]

PRECISION_HELP = ", ".join(WORDS) + "."

OLD_NAMES = {
    "--global-batch": "--minibatch",
    "--in-flight": "--cap",
    "--micro-batch": "--microbatch",
    "--micro-batches": "--microbatches",
    "--optimizer-step": "--update",
    "--precision": "--dtype",
}
"""an option's name -> what it was called before"""


class RenamedOption(click.Option):
    """An option that the parser also knows by its old name; help, usage and messages have the new one alone."""

    def add_to_parser(self, parser: Any, ctx: click.Context) -> None:
        shown = self.opts
        self.opts = [*shown, *(OLD_NAMES[name] for name in shown if name in OLD_NAMES)]
        try:
            super().add_to_parser(parser, ctx)
        finally:
            self.opts = shown


def renamed(name: str, *declarations: str, **attributes: Any) -> Callable[[Any], Any]:
    """`click.option` for a name in OLD_NAMES."""
    assert name in OLD_NAMES
    return click.option(name, *declarations, cls=RenamedOption, **attributes)


_WAYS: dict[str, Compiling] = {"auto": "auto", "yes": True, "no": False}
"""the values of --compile"""


class CompilingCommand(click.Command):
    """A command whose --compile may stand without a value, which means yes."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, _with_value(args))


def _with_value(args: list[str]) -> list[str]:
    """The words of a command line with a value for --compile; what follows -- are no options."""
    end = args.index("--") if "--" in args else len(args)
    following = [*args, ""][1:]
    return [
        "--compile=yes" if index < end and (word, after in _WAYS) == ("--compile", False) else word
        for index, (word, after) in enumerate(zip(args, following, strict=True))
    ]


def compile_option(text: str, *, default: str = "no") -> Callable[[Any], Any]:
    """The option --compile of a `CompilingCommand`, as `Compiling`."""
    return click.option(
        "--compile",
        "compiled",
        type=click.Choice(list(_WAYS)),
        default=default,
        show_default=True,
        callback=lambda _context, _option, value: _WAYS[value],
        help=text,
    )


def model_options(command: Callable[..., None]) -> Callable[..., None]:
    """What a command takes beside the MODEL that it builds."""
    command = click.option(
        "--lora",
        metavar="r=8[,…]",
        help=f"Train LoRA adapters of PEFT on an {HUGGING_FACE} model; also alpha, dropout, targets=a+b.",
    )(command)
    return click.option(
        "--arg",
        "arguments",
        multiple=True,
        metavar="KEY=VALUE",
        help=f"Passed to the model's function; of an {HUGGING_FACE} model: to its config.",
    )(command)


def read_model_arguments(model: str, options: dict[str, Any]) -> dict[str, Argument]:
    """The arguments of the model's function from `model_options`, which are taken out of the options."""
    found, lora = parse_arguments(options.pop("arguments")), options.pop("lora")
    if lora is None:
        return found
    if not model.strip().lower().startswith(HUGGING_FACE):
        raise BaPipeError(
            f"--lora is for models of transformers ({HUGGING_FACE}…), got '{model[:60]}'; put adapters into the "
            "function that builds yours"
        )
    return {**found, "lora": lora}


def optimizer_options(command: Callable[..., None]) -> Callable[..., None]:
    """What a command takes beside its --optimizer."""
    command = click.option(
        "--master-weights",
        is_flag=True,
        help="With bf16 or fp16: the optimizer keeps fp32 copies of the weights, and its state in fp32.",
    )(command)
    return click.option(
        "--optimizer-arg",
        "optimizer_arguments",
        multiple=True,
        metavar="KEY=VALUE",
        help="An option of the optimizer's class, such as fused=true.",
    )(command)


def read_optimizer(options: dict[str, Any]) -> str | None:
    """The optimizer's text from --optimizer and `optimizer_options`, which are taken out of the options."""
    arguments, masters = options.pop("optimizer_arguments"), options.pop("master_weights")
    return optimizer_text(options["optimizer"], arguments, master_weights=masters)
