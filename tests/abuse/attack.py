"""Runs one case's attackers in a separate process and prints their results as JSON: `python -m tests.abuse.attack CASE
TARGET`.

The attackers run at a lower priority. In reality, they run on other machines and use no CPU of the API's host.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections import Counter
from typing import Final

import orjson
import uvloop

from dispatcher.supervisor.preflight import raise_file_limit
from tests.abuse import bodies, framings, heavy_use, stalls
from tests.abuse.case import Case, Target

CORPUS: Final = {case.id: case for each in (framings, bodies, stalls, heavy_use) for case in each.CASES}
"""All cases by name, in the order in which they run."""


async def _attack(case: Case, target: Target) -> Counter[str]:
    until = asyncio.get_running_loop().time() + target.seconds
    got: Counter[str] = Counter()

    async def client() -> None:
        while True:
            got.update(await case.attack(target))
            if asyncio.get_running_loop().time() >= until:
                return

    await asyncio.gather(*(client() for _ in range(case.clients)))
    return got


def main() -> None:
    os.nice(5)
    raise_file_limit()
    got = uvloop.run(_attack(CORPUS[sys.argv[1]], Target(**orjson.loads(sys.argv[2]))))
    sys.stdout.buffer.write(orjson.dumps(got))


if __name__ == "__main__":
    main()
