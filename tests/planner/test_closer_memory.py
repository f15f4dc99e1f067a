"""The exact partition is asked again where what stages keep of their messages makes its answer not fit."""

from __future__ import annotations

from bapipe.costs.segments import make_chain
from bapipe.hardware.cluster_file import read_cluster
from bapipe.planner import Request, explore
from bapipe.planner.candidate import Hardware
from bapipe.planner.evaluate import evaluate
from bapipe.planner.inputs import profile_for
from bapipe.planner.pipelines import FAMILIES, build, optimal, unreplicated_stages


def test_an_optimum_that_is_a_little_short_is_looked_for_again() -> None:
    cluster = read_cluster("8xa100-40")
    profile = profile_for("llama-7b", cluster, microbatch=None, precision="fp32")
    chain, hardware = make_chain(profile, ("a100-40",), 1), Hardware(cluster=cluster)
    # What balances best by the sums over layers alone, and does not fit.
    first = unreplicated_stages((6, 13, 21, 29, 38, 47, 56, 66), range(8))
    short = evaluate(build(chain, first, FAMILIES["1f1b"], 512, hardware), hardware)
    assert short.short is not None
    assert short.short[1] < 0.4e9
    stages = optimal(chain, hardware, FAMILIES["1f1b"], 512)
    closer = evaluate(build(chain, stages, FAMILIES["1f1b"], 512, hardware), hardware)
    assert closer.short is None
    assert closer.time <= short.time * 1.001
    best = explore(profile, cluster, Request(schedule="1f1b", global_batch=512)).best
    assert best.candidate.chain.microbatch == 1
    assert best.time <= closer.time


def test_without_a_limit_nothing_is_looked_for_again() -> None:
    cluster = read_cluster("4xv100")
    profile = profile_for("gnmt-8", cluster, microbatch=None, precision="fp32")
    chain, hardware = make_chain(profile, ("v100-16",), 16), Hardware(cluster=cluster)
    families = [FAMILIES[name] for name in ("1f1b-so", "gpipe", "zb-h1")]
    found = [optimal(chain, hardware, family, 16, num_stages=4, unlimited=True) for family in families]
    assert found[0] == found[1] == found[2]
    assert found[0] == optimal(chain, hardware, FAMILIES["1f1b-so"], 16, num_stages=4)
