"""Actions on many emails: names, a filter or everything select them; the runner counts them, then changes them."""

from __future__ import annotations

from collections import Counter
from datetime import datetime
from typing import Any, ClassVar, Final
from uuid import UUID

from dispatcher.actions.action import Change, Reach, field
from dispatcher.domain.api_key import Scope
from dispatcher.domain.kinds import EMAIL_IDS, FLAG, TENANT
from dispatcher.domain.status import Status
from dispatcher.domain.values import dataclass
from dispatcher.domain.values import field as dataclass_field

SAMPLE: Final = 5
"""How many ids a preview shows per status."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one email.

    Attributes:
        name: The value of the query's column `verdict`, or `locked` or `unknown`.
        words: What the command says after the email's id.
        is_success: Whether the email is now as asked.
        code: The problem over HTTP if the request is about this email alone; the email's status follows if it is 409.
        detail: The problem's words.
        at: The field that the problem is about.
        after: The status that HTTP reports.
    """

    name: str
    words: str
    is_success: bool = False
    code: str = ""
    detail: str = ""
    at: str = ""
    after: Status | None = None


LOCKED: Final = Verdict(
    "locked",
    "not changed: another transaction holds a lock on its row. Try again later.",
    code="overloaded",
    detail="Another transaction has locked the email's row.",
)
UNKNOWN: Final = Verdict(
    "unknown", "not found in this database.", code="not-found", detail="The tenant has no email with this id."
)


@dataclass(frozen=True, slots=True)
class Judged:
    """An email and its verdict; the row type of a batch's query.

    Attributes:
        status: The status before the change; None if the email is unknown or locked.
        send_at: The new time of an email that was rescheduled.
    """

    email_id: UUID
    verdict: str
    status: Status | None
    send_at: datetime | None = dataclass_field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Group:
    """Selected emails of one status; the row type of a batch's count."""

    status: Status
    emails: int
    ids: list[UUID]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a batch selected and changed: the document of HTTP and of `--json`.

    Attributes:
        selected: The number of selected emails by status.
        samples: A few of their ids.
        others: How many of the named emails have another status, or do not exist.
        has_more: Whether more emails match than were changed.
        results: The number of emails by verdict; empty for a dry run.
        unchanged: The emails that are not as asked, each with its verdict and its status.
    """

    selected: dict[Status, int]
    samples: dict[Status, list[UUID]]
    others: int
    has_more: bool
    results: dict[str, int]
    unchanged: dict[str, Unchanged]


@dataclass(frozen=True, slots=True)
class Unchanged:
    """An email that is not as asked."""

    result: str
    status: Status | None


class Batch(Change[Outcome], reach=Reach.ANY_TENANT):
    """A change of many emails.

    Attributes:
        count, find: The queries that count the selected emails, and that return their ids.
        filters: The fields that select emails.
        http_one: The operation on one email, if there is one.
        one_scopes: More scopes that are enough for it.
        verdicts: What can become of an email, besides `LOCKED` and `UNKNOWN`.
    """

    count: ClassVar[str]
    find: ClassVar[str]
    filters: ClassVar[tuple[str, ...]]
    http_one: ClassVar[str] = ""
    one_scopes: ClassVar[tuple[Scope, ...]] = ()
    verdicts: ClassVar[tuple[Verdict, ...]]
    needs_reason, has_dry_run = False, True
    none_selected: ClassVar[str] = "No email matches."
    others: ClassVar[str] = "of another status"
    """What is said of named emails that `count` does not count."""
    batch_rows: ClassVar[int] = 500
    most_over_http: ClassVar[int] = 10_000

    tenant_id: str | None = field(TENANT, "Only this tenant; with message keys: the tenant of the keys.", default=None)
    email_ids: tuple[UUID, ...] | None = field(EMAIL_IDS, "Only these emails.", default=None)
    all: bool = field(FLAG, "Select every email.", default=False)
    dry_run: bool = field(FLAG, "Only show how many emails are selected; change nothing.", default=False)

    def selection(self) -> dict[str, Any]:
        """The parameters of `count` and `find`."""
        ids = None if self.email_ids is None else list(self.email_ids)
        return {**{name: getattr(self, name) for name in self.filters}, "tenant_id": self.tenant_id, "email_ids": ids}

    @classmethod
    def selectors(cls) -> tuple[str, ...]:
        """The fields that select emails. Only a dry run needs none of them."""
        return (*cls.filters, "email_ids", "all")

    def is_selecting(self) -> bool:
        return any(getattr(self, name) not in (None, False) for name in self.selectors())

    def change(self) -> dict[str, Any]:
        """More parameters of the query."""
        return {}

    @classmethod
    def rows(cls) -> dict[str, type[Any]]:
        """The named statements that the action uses, each with the type of its rows."""
        return {cls.query: Judged, cls.count: Group}

    @classmethod
    def outcome(cls, groups: list[Group], ids: int, judged: list[Judged], *, most: int | None = None) -> Outcome:
        """The document of what was selected (`ids` emails) and judged."""
        selected = sum(each.emails for each in groups)
        return Outcome(
            {each.status: min(each.emails, most or each.emails) for each in groups},
            {each.status: each.ids for each in groups},
            max(0, ids - selected),
            most is not None and selected > most,
            Counter(each.verdict for each in judged),
            {
                str(each.email_id): Unchanged(each.verdict, each.status)
                for each in judged
                if not cls.verdict(each.verdict).is_success
            },
        )

    @classmethod
    def verdict(cls, name: str) -> Verdict:
        """The verdict with this name."""
        return next(each for each in (*cls.verdicts, LOCKED, UNKNOWN) if each.name == name)
