"""`bapipe cluster detect --hosts`: one file of several machines, asked by a command that runs here."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from bapipe.cli.cluster_detect import detect_command
from bapipe.cli.cluster_hosts import host_command
from bapipe.errors import BaPipeError
from bapipe.hardware.cluster import Link
from bapipe.hardware.cluster_file import parse_cluster, read_cluster
from bapipe.hardware.cluster_merge import merged_clusters

ANSWER = """
schema = "bapipe.cluster/1"
name = "{node}"

[[accelerators]]
type = "cpu-here"
count = {count}
node = "{node}"

[types."cpu-here"]
kind = "cpu"
memory = 8e9
memory_bandwidth = {rate}
flops = {{ fp32 = {rate} }}

[links.within]
bandwidth = {rate}
latency = 5e-5
"""


@pytest.fixture
def answers(tmp_path: Path) -> Path:
    """A folder with what each host answers, by its name; each has the same hostname, as in a stand-in."""
    for host, count, rate in (("a", 2, 2e9), ("b", 3, 1e9)):
        text = ANSWER.format(node="same", count=count, rate=rate)
        (tmp_path / host).write_text(f"Welcome to {host}!\n{text}", encoding="utf-8")
    return tmp_path


def detected(*options: str) -> Result:
    return CliRunner().invoke(detect_command, list(options))


def test_all_hosts_are_in_one_file(answers: Path, tmp_path: Path) -> None:
    """The stand-in answers with a file in place of the command, which it gets as one text, as ssh does."""
    via = f'sh -c \'test "$1" = "bapipe cluster detect --threads 1" && cat {answers}/{{host}}\' -'
    out = tmp_path / "cluster.toml"
    done = detected("--hosts", "a,b", "--via", via, "--between", "25 Gb/s", "--latency", "20 us", "-o", str(out))
    assert done.exception is None, done.output
    assert done.output == f"wrote {out}: 5 accelerators on 2 nodes\n"
    cluster = read_cluster(str(out))
    assert [one.name for one in cluster.accelerators] == ["a/0", "a/1", "b/0", "b/1", "b/2"]
    assert cluster.nodes == ("a", "b")
    assert cluster.between is not None
    assert (cluster.between.bandwidth, cluster.between.latency) == pytest.approx((25e9 / 8, 20e-6))
    assert cluster.within.bandwidth == 1e9  # the slower one stands for both
    assert cluster.types["cpu-here"].flops == {"fp32": 1e9}
    assert "# links between nodes: stated: 25 Gb/s" in out.read_text(encoding="utf-8")


def test_this_machine_can_stand_for_hosts(tmp_path: Path) -> None:
    """The real command, run by a shell in the place of ssh."""
    pytest.importorskip("torch", reason="a machine is detected with torch: pip install bapipe[torch]")
    out = tmp_path / "cluster.toml"
    remote = f"{Path(sys.executable).parent / 'bapipe'}"
    done = detected("--hosts", "a,b", "--via", "sh -c", "--remote", remote, "--ranks", "2", "-o", str(out))
    assert done.exception is None, done.output
    assert len(read_cluster(str(out)).accelerators) == 4
    assert "between hosts is an assumption; state it: --between" in done.output


def test_a_host_that_stays_silent_is_one_line(answers: Path) -> None:
    via = f"sh -c 'test {{host}} = a && cat {answers}/a || sleep 60' -"
    begun = time.monotonic()
    done = detected("--hosts", "a,b", "--via", via, "--timeout", "1")
    assert isinstance(done.exception, BaPipeError)
    assert str(done.exception).startswith("b did not answer within 1 s; try sh -c ")
    assert "\n" not in str(done.exception)
    assert time.monotonic() - begun < 50, "what a shell had started was waited for"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("--via", "sh -c 'echo gone >&2; exit 7' -"),
            r"^a failed with code 7: gone; b failed with code 7: gone; try",
        ),
        (("--via", "no-such-command-here"), r"^a cannot be asked: no-such-command-here: No such file"),
        (("--via", "echo"), r"^a answered no cluster file; see that bapipe cluster detect works there"),
        (("--hosts", "a,a"), r"^--hosts takes different names, a,b,…, got 'a,a'; correct it"),
        (("--hosts", "-oProxyCommand=x"), r"^--hosts takes names of machines, got '-oProxyCommand=x'"),
        (("--between", "fast"), r"^--between"),
    ],
)
def test_what_goes_wrong_is_one_line(options: tuple[str, ...], message: str) -> None:
    done = detected("--hosts", "a,b", *options)
    assert isinstance(done.exception, BaPipeError)
    with pytest.raises(BaPipeError, match=message):
        raise done.exception


def test_ssh_gets_a_text_and_srun_words() -> None:
    command = ["bapipe", "cluster", "detect"]
    assert host_command("ssh", "n1", command) == ["ssh", "-o", "BatchMode=yes", "n1", "bapipe cluster detect"]
    assert host_command("srun", "n1", command)[-4:] == ["--nodelist=n1", *command]
    assert host_command("ip netns exec {host} sh -c", "n1", command)[3:] == [
        "n1",
        "sh",
        "-c",
        "bapipe cluster detect",
    ]


def test_a_file_of_several_nodes_is_no_answer_of_one(answers: Path) -> None:
    text = (answers / "a").read_text(encoding="utf-8").partition("\n")[2]
    one = parse_cluster(text, where="a")
    link = Link(bandwidth=1e9, latency=0.0)
    two = merged_clusters({"a": one, "b": one}, between=link, name="both")
    with pytest.raises(BaPipeError, match=r"'c' describes 2 nodes; give a file of one machine from each host"):
        merged_clusters({"c": two}, between=link, name="all")
