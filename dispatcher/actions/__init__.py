"""The operator actions, one module per subject: each action is one record (see `action.py`)."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final

from dispatcher.actions.action import Action

SUBJECTS: Final = (
    *("emails", "lanes", "tenants", "domains", "pauses", "unsent", "resend"),
    *("suppressions", "held", "dlq", "keys", "webhooks", "audit", "reported_events", "stats"),
)
"""The modules with actions, in the order of the documentation."""


def all_actions() -> list[type[Action[Any]]]:
    return [each for subject in SUBJECTS for each in import_module(f"dispatcher.actions.{subject}").ACTIONS]
