"""Select failed and held emails, and send them again."""

from __future__ import annotations

from typing import Any, Final, TypeVar
from uuid import UUID

from dispatcher.actions.action import Action, Change, Reach, field
from dispatcher.domain.failures import Replay, Selection
from dispatcher.domain.kinds import AGE, FILTER_TEXT, FLAG, IDS, TENANT, Kind, number, one_of
from dispatcher.domain.outcome import Reason
from dispatcher.domain.status import Status
from dispatcher.errors import InvalidEmail

R = TypeVar("R")
DEFAULT_PER_SECOND: Final = 50.0
MIN_PER_SECOND: Final = 0.01
"""The lowest rate in emails per second. Slower replays would occupy their PostgreSQL session for too long."""
MAX_PER_SECOND: Final = 10_000


def _provider(value: object) -> str:
    """The name of a provider. A misspelt name would select nothing, and look as if no email had failed."""
    from dispatcher.config.plugins import provider_names

    if value not in (known := provider_names()):
        raise InvalidEmail("provider", f"must be one of: {', '.join(known)}")
    return str(value)


PROVIDER: Final = Kind(
    "must be the name of a provider", {"type": "string", "minLength": 1, "maxLength": 255}, _provider, metavar="NAME"
)


class FailureFilter(Action[R]):
    """Selects failed and held emails. Every face has these fields; `dead_emails` in dead.sql applies them."""

    error_type: str | None = field(one_of(Reason), "Only this error type, such as outcome_unknown.", default=None)
    provider: str | None = field(PROVIDER, "Only emails whose last attempt used this provider.", default=None)
    channel: str | None = field(FILTER_TEXT, "Only this channel: `email` or `sms`.", default=None)
    tenant_id: str | None = field(TENANT, "Only this tenant; with message keys: the tenant of the keys.", default=None)
    text: str | None = field(
        FILTER_TEXT, "Only emails whose last error contains this text; case does not matter.", default=None
    )
    tag: str | None = field(FILTER_TEXT, "Only emails with this tag, and whose content is not deleted.", default=None)
    older_than_seconds: float | None = field(AGE, "Only emails enqueued longer ago than this.", default=None)
    newer_than_seconds: float | None = field(AGE, "Only emails enqueued more recently than this.", default=None)

    def selected(self, **more: Any) -> Selection:
        """The filter as a selection, with more of its fields."""
        given = {name: value for name, value in self.values().items() if name in Selection.__match_args__}
        return Selection(**given | more)


class DeadFilter(FailureFilter[R]):
    """Selects failed emails, held emails, or both."""

    status: Status | None = field(one_of(Status, "failed", "held"), "Only this status.", default=None)
    discarded: bool = field(
        FLAG, "Only emails whose dead letter was discarded; otherwise, they are left out.", default=False
    )


class CreateReplay(
    DeadFilter[Replay], Change[Replay], name="dlq replay", http="POST /v1/replays", reach=Reach.OWN_TENANT
):
    """Send failed emails again. Selects the emails now, then replays them at `per_second`. Skips emails that are `sent`
    by then. Replays emails that may have arrived only with `include_held`."""

    email_ids: tuple[UUID, ...] | None = field(IDS, "Only these emails.", default=None)
    include_held: bool = field(FLAG, "Also replay emails that may have arrived.", default=False)
    per_second: float = field(number(MIN_PER_SECOND, MAX_PER_SECOND), "Emails per second.", default=DEFAULT_PER_SECOND)
    force: bool = field(
        FLAG, "Keep this replay's own rate even if a running replay includes some of the same emails.", default=False
    )
