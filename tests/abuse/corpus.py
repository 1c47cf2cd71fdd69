"""All cases by name, in the order in which they run."""

from __future__ import annotations

from typing import Final

from tests.abuse import bodies, framings, heavy_use, keys, operators, stalls
from tests.abuse.case import Case

CORPUS: Final[dict[str, Case]] = {
    case.id: case
    for case in (
        *framings.CASES,
        *keys.CASES,
        *bodies.CASES,
        *operators.CASES,
        *stalls.CASES,
        *heavy_use.CASES,
    )
}
