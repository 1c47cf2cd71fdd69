"""Makes the suppression rules from the settings: which events of providers suppress a recipient. `store_events` applies
the rules."""

from __future__ import annotations

from dispatcher.config import Settings
from dispatcher.domain.suppression import SuppressionReason, SuppressionRules


def suppression_rules(settings: Settings) -> SuppressionRules:
    """The configured rules, for `EventIntake`."""
    return SuppressionRules(
        reasons=frozenset(SuppressionReason(name) for name in settings.suppress_on),
        days=settings.suppress_days,
        soft_bounces=settings.suppress_soft_bounces,
        soft_bounce_days=settings.suppress_soft_bounce_days,
    )
