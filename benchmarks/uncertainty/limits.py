"""What any choice before a run must lose, by several rules, under 100 truths of each profile: limits-NOISE.json.

python benchmarks/uncertainty/limits.py                     40 profiles that run.py does not have, some minutes
python benchmarks/uncertainty/limits.py --noise deviation   errors that are now and then twice as large

The last two rows choose in hindsight, one plan of each profile for all its truths: no choice before a run does
better than these, by its mean or at worst.

Regret is counted against the fastest of the candidates that were weighed: a better one that is not among them is
not seen. The scenarios that a choice goes by and the truths are drawn apart.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from run import HERE, NOISES, draw_truths, knowing, random_case

from bapipe.planner import explore

FIRST = 6000
"""seed of the first profile; run.py begins at 0"""
TRUTHS = 100
Rule = Callable[[NDArray[np.float64]], NDArray[np.float64]]
RULES: dict[str, Rule] = {
    "least mean regret": lambda regret: regret.mean(axis=1),
    "least root mean square": lambda regret: np.sqrt(np.square(regret).mean(axis=1)),
    "least mean and a fifth of the 95th percentile": lambda regret: (
        regret.mean(axis=1) + 0.2 * np.percentile(regret, 95, axis=1)
    ),
    "least 95th percentile": lambda regret: np.percentile(regret, 95, axis=1),
    "as the planner chooses": lambda regret: (
        np.arange(len(regret)) - 1.0 * len(regret) * (np.arange(len(regret)) == 0)
    ),
}
"""by the candidates' regrets in the scenarios, the planner's choice first; the smallest value is taken"""
HINDSIGHT: dict[str, Rule] = {
    "in hindsight, least mean regret": lambda regret: regret.mean(axis=1),
    "in hindsight, least worst regret": lambda regret: regret.max(axis=1),
}
"""the same by the candidates' regrets in the truths"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profiles", type=int, default=40)
    parser.add_argument("--noise", choices=list(NOISES), default="within")
    parser.add_argument("--out", help="limits-NOISE.json beside this file unless given")
    options = parser.parse_args()
    found: dict[str, list[NDArray[np.float64]]] = {name: [] for name in (*RULES, *HINDSIGHT)}
    for seed in range(FIRST, FIRST + options.profiles):
        case = random_case(seed)
        explored = explore(case.profile, case.cluster, knowing(case, options.noise))
        outlook = explored.outlook
        assert outlook is not None
        known = outlook.times / outlook.times.min(axis=0) - 1
        truths = draw_truths(case, options.noise, TRUTHS, seed=99)
        times = truths.times(outlook.evaluations, explored.hardware)
        regret = times / times.min(axis=0) - 1
        for name, rule in RULES.items():
            found[name].append(regret[int(rule(known).argmin())])
        for name, rule in HINDSIGHT.items():
            found[name].append(regret[int(rule(regret).argmin())])
    rows = {}
    for name, parts in found.items():
        values = np.concatenate(parts)
        rows[name] = {
            "mean": float(values.mean()),
            "percentile_95": float(np.percentile(values, 95)),
            "worst": float(values.max()),
        }
    result = {"profiles": options.profiles, "truths": TRUTHS, "rules": rows}
    out = Path(options.out or HERE / f"limits-{options.noise}.json")
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
