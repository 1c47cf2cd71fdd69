"""Runs one case's attackers in a separate process and prints their results as JSON: `python -m tests.abuse.attack CASE
TARGET`.

The attackers run at a lower priority. In reality, they run on other machines and use no CPU of the API's host.
"""

from __future__ import annotations

import asyncio
import os
import resource
import sys
import time
from collections import Counter
from typing import Any
from uuid import UUID

import orjson
import uvloop

from dispatcher.supervisor.preflight import raise_file_limit
from tests.abuse.case import Case, Target
from tests.abuse.corpus import CORPUS


async def _attack(case: Case, target: Target) -> Counter[str]:
    loop = asyncio.get_running_loop()
    until = loop.time() + target.seconds
    got: Counter[str] = Counter()

    async def client() -> None:
        while True:
            got.update(await case.attack(target))
            if loop.time() >= until:
                return

    await asyncio.gather(*(client() for _ in range(case.clients)))
    return got


def parse_target(known: dict[str, Any]) -> Target:
    return Target(**known | {"held": [UUID(text) for text in known["held"]], "foreign": UUID(known["foreign"])})


def main() -> None:
    os.nice(5)
    raise_file_limit()
    case, target = CORPUS[sys.argv[1]], parse_target(orjson.loads(sys.argv[2]))
    began_at = time.monotonic()
    got = uvloop.run(_attack(case, target))
    ended_at = time.monotonic()
    usage = resource.getrusage(resource.RUSAGE_SELF)
    result = {"got": got, "began_at": began_at, "ended_at": ended_at, "cpu_seconds": usage.ru_utime + usage.ru_stime}
    sys.stdout.buffer.write(orjson.dumps(result) + b"\n")


if __name__ == "__main__":
    main()
