"""One case's attackers, in a process of their own: `python -m tests.abuse.attack CASE PREY`; what they got, as JSON.

They run at the lowest priority: on a machine of their own they would take none of the API's CPU.
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
from tests.abuse.case import Case, Prey
from tests.abuse.corpus import CORPUS


async def _attack(case: Case, prey: Prey) -> Counter[str]:
    loop = asyncio.get_running_loop()
    until = loop.time() + prey.seconds
    got: Counter[str] = Counter()

    async def client() -> None:
        while True:
            got.update(await case.attack(prey))
            if loop.time() >= until:
                return

    await asyncio.gather(*(client() for _ in range(case.clients)))
    return got


def prey_of(known: dict[str, Any]) -> Prey:
    """What the attackers know, from JSON."""
    return Prey(**known | {"held": [UUID(text) for text in known["held"]], "foreign": UUID(known["foreign"])})


def main() -> None:
    """The command line."""
    os.nice(5)
    raise_file_limit()
    case, prey = CORPUS[sys.argv[1]], prey_of(orjson.loads(sys.argv[2]))
    began_at = time.monotonic()
    got = uvloop.run(_attack(case, prey))
    ended_at = time.monotonic()
    usage = resource.getrusage(resource.RUSAGE_SELF)
    told = {"got": got, "began_at": began_at, "ended_at": ended_at, "cpu_seconds": usage.ru_utime + usage.ru_stime}
    sys.stdout.buffer.write(orjson.dumps(told) + b"\n")


if __name__ == "__main__":
    main()
