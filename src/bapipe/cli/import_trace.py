"""`bapipe import-trace`: layer times from a trace of PyTorch's profiler."""

from __future__ import annotations

import click

from bapipe.cli.options import renamed

__all__ = ["import_trace_command"]


@click.command("import-trace")
@click.argument("trace_file", type=click.Path(dir_okay=False))
@click.option(
    "--profile",
    "profile_file",
    required=True,
    type=click.Path(dir_okay=False),
    help="Of the same model, for bytes.",
)
@click.option(
    "--accelerator", required=True, metavar="TYPE", help="Type that the trace was made on, such as h100."
)
@renamed("--micro-batch", "microbatch", required=True, type=int, help="Samples that the model was called with.")
@click.option("-o", "--out", required=True, type=click.Path(dir_okay=False), help="Write profile.json.")
def import_trace_command(trace_file: str, profile_file: str, accelerator: str, microbatch: int, out: str) -> None:
    """Take layer times from TRACE_FILE, which torch.profiler's export_chrome_trace wrote.

    The forward of each module runs in torch.profiler.record_function(PATH), with its path in the model. What
    layers send and save is as in --profile, which may be of another machine.

    \b
    Example:
      bapipe import-trace trace.json --profile cpu.json --accelerator h100 --micro-batch 4 -o h100.json
    """
    from bapipe.analysis.trace_times import profile_of_trace
    from bapipe.costs.profile import read_profile, write_profile
    from bapipe.costs.profile_ways import of_way
    from bapipe.units import format_seconds

    base = of_way(read_profile(profile_file), compiled=False)
    made, found = profile_of_trace(base, trace_file, accelerator=accelerator, microbatch=microbatch)
    write_profile(made, out)
    total = [format_seconds(sum(times.values())) for times in (found.forward, found.backward)]
    kind = "kernels" if found.device else "the host"
    click.echo(f"{found.calls} calls: forward {total[0]}, backward {total[1]} each, times of {kind}")
    click.echo(f"wrote {out}")
