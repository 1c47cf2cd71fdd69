"""`python -m tests.model` searches every reachable state; `--mutant NAME` shows why a rule is needed."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace

from dispatcher.domain.status import OnUncertain
from tests.model.mutants import MUTANTS
from tests.model.protocol import Fault, Rules
from tests.model.search import search


def main() -> int:
    """Returns 0 if no guarantee is broken; otherwise prints the shortest path to a broken guarantee, and returns 1."""
    options = _options()
    usual = [Rules(policy=policy, keys=options.keys) for policy in OnUncertain]
    rules = [MUTANTS[options.mutant]] if options.mutant else usual
    return max([_report(each, options.faults) for each in rules])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.model", description=__doc__)
    parser.add_argument("--mutant", choices=sorted(MUTANTS), help="search the protocol without this rule")
    parser.add_argument("--keys", action="store_true", help="two providers, and one of them has idempotency keys")
    parser.add_argument(
        "--faults",
        type=lambda names: frozenset(Fault[name.upper()] for name in names.split(",")),
        metavar="NAME,…",
        help="faults that may occur (default: all but event, promotion, cancel, reschedule and expiry, takes minutes): "
        + ", ".join(fault.name.lower() for fault in Fault),
    )
    return parser.parse_args()


def _report(rules: Rules, faults: frozenset[Fault] | None) -> int:
    began = time.monotonic()
    found = search(rules if faults is None else replace(rules, faults=faults))
    ends = ", ".join(f"{count} {status}" for status, count in sorted(found.ends.items()))
    seconds = time.monotonic() - began
    print(f"policy {rules.policy}: {found.states} states, {found.steps} steps, ends: {ends or 'none'}, {seconds:.1f} s")
    if found.counterexample:
        print(found.counterexample)
    return int(found.counterexample is not None)


if __name__ == "__main__":
    sys.exit(main())
