"""`bapipe cluster detect`: a cluster file of this machine, or of several."""

from __future__ import annotations

import click

from bapipe.cli.cluster_hosts import answers_of
from bapipe.errors import BaPipeError
from bapipe.hardware.cluster import Cluster, Link
from bapipe.hardware.cluster_file import parse_cluster
from bapipe.hardware.cluster_merge import merged_clusters
from bapipe.hardware.cluster_toml import cluster_toml
from bapipe.io.files import check_output, write_text
from bapipe.units import format_bandwidth, parse_bandwidth, parse_seconds

__all__ = ["detect_command"]

_ASSUMED = "10 Gb/s"


@click.command("detect")
@click.option("-o", "--out", type=click.Path(dir_okay=False), help="Write cluster.toml.")
@click.option("--ranks", type=int, help="Accelerators to list.  [default: GPUs, or cores by threads]")
@click.option("--threads", type=int, default=1, show_default=True, help="Of each rank on a CPU.")
@click.option("--hosts", help="Ask these machines, a,b,…, and write one file of all.")
@click.option("--via", default="ssh", show_default=True, help="How: ssh, srun, or a command with {host} in it.")
@click.option("--remote", default="bapipe", show_default=True, help="BaPipe's command on the hosts.")
@click.option("--between", help=f"Bandwidth between hosts.  [default: {_ASSUMED} is assumed]")
@click.option("--latency", default="50 us", show_default=True, help="Between hosts.")
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=120.0,
    show_default=True,
    help="Of a host, in s.",
)
def detect_command(
    out: str | None,
    ranks: int | None,
    threads: int,
    hosts: str | None,
    via: str,
    remote: str,
    between: str | None,
    latency: str,
    timeout: float,
) -> None:
    """Write a cluster file of this machine: GPUs, or CPU cores as ranks; with --hosts, one of several machines.

    \b
    Examples:
      bapipe cluster detect -o cluster.toml
      bapipe cluster detect --hosts gpu01,gpu02 --via ssh --between "25 Gb/s" -o cluster.toml
    """
    check_output(out)
    if ranks is not None and ranks < 1:
        raise BaPipeError(f"a cluster needs at least 1 rank, got {ranks}; raise --ranks")
    if hosts is None:
        _this_machine(out, ranks, threads)
        return
    link = Link(
        bandwidth=parse_bandwidth(between or _ASSUMED, what="--between"),
        latency=parse_seconds(latency, what="--latency"),
    )
    options = ["--threads", str(threads), *([] if ranks is None else ["--ranks", str(ranks)])]
    answers = answers_of(_names(hosts), [remote, "cluster", "detect", *options], via=via, timeout=timeout)
    cluster = merged_clusters(
        {host: _parsed(host, text) for host, text in answers.items()}, between=link, name=", ".join(answers)[:60]
    )
    how = f"stated: {between}" if between else "an assumption; state it with --between"
    text = cluster_toml(
        cluster, comment=f"links between nodes: {how}, or correct it by bapipe compare --cluster-out"
    )
    if out:
        write_text(out, text)
        click.echo(f"wrote {out}: {len(cluster.accelerators)} accelerators on {len(answers)} nodes")
    else:
        click.echo(text, nl=False)
    if not between:
        click.echo(
            f"{format_bandwidth(link.bandwidth)} between hosts is an assumption; state it: --between", err=True
        )


def _names(hosts: str) -> list[str]:
    names = [name.strip() for name in hosts.split(",") if name.strip()]
    twice = next((name for name in names if names.count(name) > 1), None)
    if not names or twice:
        raise BaPipeError(f"--hosts takes different names, a,b,…, got '{hosts[:60]}'; correct it")
    odd = next((name for name in names if name.startswith("-")), None)
    if odd is not None:
        raise BaPipeError(f"--hosts takes names of machines, got '{odd[:60]}'; correct it")
    return names


def _parsed(host: str, text: str) -> Cluster:
    """The answer of a host; what a shell writes before it, such as a greeting, is left out."""
    start = text.find("schema =")
    if start < 0:
        raise BaPipeError(
            f"{host} answered no cluster file; see that bapipe cluster detect works there, with the same version"
        )
    return parse_cluster(text[start:], where=f"the answer of {host}")


def _this_machine(out: str | None, ranks: int | None, threads: int) -> None:
    from bapipe.torch.profiler.detect_machine import cluster_text, detect

    machine = detect(ranks=ranks, threads=threads)
    text = cluster_text(machine)
    if out:
        write_text(out, text)
        click.echo(f"wrote {out}: {machine}")
    else:
        click.echo(text, nl=False)
    if machine.kind == "cpu":
        click.echo(f"profile for it with --device cpu --threads {threads}", err=True)
