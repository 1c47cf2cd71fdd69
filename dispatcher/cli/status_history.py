"""`dispatcher status --history`: the attempts of the last hours or days, by provider and outcome."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import UTC
from typing import TYPE_CHECKING, Any, Final

from dispatcher.cli.output import print_data, print_json
from dispatcher.cli.table import Styled, Table

if TYPE_CHECKING:
    from dispatcher.config import Settings
    from dispatcher.store.figures import Attempts

OUTCOMES: Final = ("accepted", "deferred", "rejected", "uncertain")
"""The outcomes that always have a column. If a later release has recorded other outcomes, their columns follow."""
LONGEST_SECONDS: Final = 400 * 86_400.0
HOURS_UP_TO_SECONDS: Final = 2 * 86_400.0
"""A history of at most this length has one row per hour; a longer history has one row per day."""
_SHAPES: Final = {"hour": "%Y-%m-%d %H:%M", "day": "%Y-%m-%d"}


def show_history(settings: Settings, seconds: float, *, as_json: bool) -> bool:
    """Prints the history; returns False if the reader closed the pipe.

    Raises:
        StoreUnavailable, SchemaError: PostgreSQL cannot be read.
    """
    from dispatcher.store.connections import connected
    from dispatcher.store.figures import sum_attempts

    unit = "hour" if seconds <= HOURS_UP_TO_SECONDS else "day"
    units = ("hour", "day") if as_json else (unit,)
    with connected(settings.database_url, name="dispatcher status") as connection:
        found = {unit: sum_attempts.sync(connection, unit, seconds) for unit in units}
    if as_json:
        return print_json({f"{unit}s": [_to_json(each) for each in found[unit]] for unit in units})
    if not found[unit]:
        return print_data("No attempt ended in this time.")
    return history_table(found[unit], unit).show()


def history_table(attempts: Sequence[Attempts], unit: str) -> Table:
    """A table with a row for each provider in each hour or day, a column for each outcome, and the totals below."""
    by_row: dict[tuple[str, str], Counter[str]] = {}
    for each in attempts:
        row = (f"{each.begins_at.astimezone(UTC):{_SHAPES[unit]}}", each.provider)
        by_row.setdefault(row, Counter())[each.outcome] += each.emails
    names = [*OUTCOMES, *sorted({each.outcome for each in attempts} - set(OUTCOMES))]
    shown = Table(f"{unit} (UTC)", "provider", *names, "accepted of all", right=range(2, len(names) + 3))
    before = ""
    for (begins, provider), counts in sorted(by_row.items()):
        # Show each hour or day only in its first row, so that the reader sees where the next hour or day begins.
        shown.add("" if begins == before else begins, provider, *_cells(counts, names))
        before = begins
    shown.add_gap()
    for provider in sorted({each.provider for each in attempts}):
        counts = sum((counts for (_, name), counts in by_row.items() if name == provider), Counter())
        shown.add("total", provider, *_cells(counts, names))
    return shown


def _cells(counts: Counter[str], names: Sequence[str]) -> list[object]:
    share = counts["accepted"] / total if (total := counts.total()) else 0.0
    styles = {"rejected": "red", "uncertain": "yellow"}
    cells: list[object] = [Styled(f"{counts[name]:,}", styles.get(name, "") if counts[name] else "") for name in names]
    # Round down, so that 100 % appears only if all attempts were accepted.
    return [*cells, f"{int(share * 1000) / 10:.1f} %"]


def _to_json(attempts: Attempts) -> dict[str, Any]:
    begins_at = f"{attempts.begins_at.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"
    return {
        "begins_at": begins_at,
        "provider": attempts.provider,
        "outcome": attempts.outcome,
        "attempts": attempts.emails,
    }
