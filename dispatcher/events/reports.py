"""Counts and logs what a source refuses or leaves out. No content is logged."""

from __future__ import annotations

from typing import Final

from dispatcher.events.contract import ParsedEvents, Refusal, Skipped
from dispatcher.telemetry import metrics
from dispatcher.telemetry.log import get_log

_NO_KIND: Final = "unknown"
_LOGGED: Final = (Skipped.MALFORMED, Skipped.UNKNOWN_KIND)
"""The reasons that are logged. The other reasons are normal, for example because another program sends through the same
account."""


def report_refusal(provider: str, refusal: Refusal) -> None:
    """Counts a request that is not genuine. Logs nothing, because the API logs the number of refusals once a minute."""
    metrics.EVENTS.add(1, provider, _NO_KIND, "stale" if refusal is Refusal.STALE else "forged", "unknown")


def report_skipped(provider: str, parsed: ParsedEvents) -> None:
    """Counts the events that were left out. Logs the number of events that are malformed or of an unknown kind."""
    for why, count in parsed.skipped.items():
        metrics.EVENTS.add(count, provider, _NO_KIND, why.value, "unknown")
    counts = {why.value: parsed.skipped[why] for why in _LOGGED if parsed.skipped[why]}
    if counts:
        get_log().warning("events.skipped", provider=provider, counts=counts)
