"""All cases, in their order, by name."""

from __future__ import annotations

from typing import Final

from tests.abuse import bodies, framings, keys, neighbours, operators, stalls
from tests.abuse.case import Case

CORPUS: Final[dict[str, Case]] = {
    case.id: case
    for case in (
        *framings.CASES,
        *keys.CASES,
        *bodies.CASES,
        *operators.CASES,
        *stalls.CASES,
        *neighbours.CASES,
    )
}
