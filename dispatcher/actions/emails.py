"""Find emails."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, ClassVar, Final
from uuid import UUID

from dispatcher.actions.action import Mistake, Mistakes, Page, Paged, Reach, field
from dispatcher.domain.api_key import Scope
from dispatcher.domain.event import DELIVERY_FILTERS
from dispatcher.domain.kinds import FILTER_TEXT, METADATA, SINCE, TENANT, Kind, Wrong, cursor_text, one_of, whole
from dispatcher.domain.listed_email import ListedEmail
from dispatcher.domain.outcome import Reason
from dispatcher.domain.status import Status
from dispatcher.domain.suppression import RECIPIENT_PATTERN, Recipient
from dispatcher.domain.values import dataclass

MAX_ADDRESS_CHARACTERS: Final = 1_000
MAX_EMAILS: Final = 1_000


def _recipient(text: str, *, addresses: bool, domains: bool) -> str:
    if not 3 <= len(text) <= MAX_ADDRESS_CHARACTERS:
        raise ValueError
    found = Recipient.parse(text if addresses or "@" in text else f"@{text}")
    if found.is_domain and not domains:
        raise Wrong(("", "must be an address; for a domain, use `domain`"))
    if not found.is_domain and not addresses:
        raise Wrong(("", "must be a domain; for an address, use `recipient`"))
    return text


def _whom(what: str, metavar: str, *, addresses: bool = False, domains: bool = False) -> Kind[str]:
    """Addresses, domains or both. The words never repeat the text."""
    schema = {"type": "string", "minLength": 3, "maxLength": MAX_ADDRESS_CHARACTERS, "pattern": RECIPIENT_PATTERN}
    rule = f"must be {what} of 3 to {MAX_ADDRESS_CHARACTERS:,} characters"
    return Kind(rule, schema, lambda text: _recipient(text, addresses=addresses, domains=domains), metavar=metavar)


def _delivery(value: object) -> str:
    if value not in DELIVERY_FILTERS:
        raise ValueError
    return str(value)


DELIVERY: Final = Kind(
    f"must be one of: {', '.join(DELIVERY_FILTERS)}",
    {"type": "string", "enum": list(DELIVERY_FILTERS)},
    _delivery,
    choices=list(DELIVERY_FILTERS),
)


@dataclass(frozen=True)
class FoundPage(Page[ListedEmail]):
    """A page of emails, newest first.

    Attributes:
        was_cut: Whether the page ended early, because it reads a limited number of emails. More emails may match.
        recipients_since: Emails that were created before this time cannot be found by their recipients. None if all
            emails can be found, or if the request has no recipient and no domain.
    """

    was_cut: bool = False
    recipients_since: datetime | None = None

    @property
    def emails(self) -> list[ListedEmail]:
        return self.rows


class ListEmails(Paged[ListedEmail], name="find", http="GET /v1/emails", scope=Scope.READ, reach=Reach.ANY_TENANT):
    """Find emails, whatever their status, newest first. An email must match all filters. Its recipients are masked.

    `recipient` (--to) and `domain` compare keyed hashes of the recipients. The hashes of recipients are kept as long as
    the email's row. There is one exception: if the email has `erase_after_sending`, they are erased together with the
    content. The sender, the tags and the metadata of every email are deleted together with its content: by default,
    after 30 days.

    For each page, the search reads a limited number of emails. If it reaches this limit before it has found `limit`
    emails, the page ends early or is empty, and `was_cut` is true. The list ends when `next` is null.

    An early release stored no hashes of recipients. If the database still has such emails, a search by recipient or
    domain finds only emails that were enqueued at `recipients_since` or later. Otherwise, `recipients_since` is null.

    Over HTTP, a query string is visible to proxies: configure them not to log it.

    Exit codes: 0 the page has emails, or the search is not finished (--after continues it); 1 no email matches.
    """

    key: ClassVar = {"email_id": UUID}
    page_type: ClassVar = FoundPage

    recipient: str | None = field(
        _whom("an address", "ADDRESS", addresses=True),
        "Only emails to this address, in to, cc or bcc. Case does not matter. In a URL, percent-encode a `+`.",
        default=None,
        option="--to",
    )
    domain: str | None = field(
        _whom("a domain", "DOMAIN", domains=True),
        "Only emails with a recipient in this domain, such as example.org.",
        default=None,
    )
    sender: str | None = field(
        _whom("an address or a domain", "ADDRESS|@DOMAIN", addresses=True, domains=True),
        "Only emails from this address or domain (`@example.com`) whose content is not deleted yet.",
        default=None,
        option="--from",
    )
    tag: str | None = field(FILTER_TEXT, "Only emails with this tag whose content is not deleted yet.", default=None)
    metadata: str | None = field(
        METADATA, "Only emails with this metadata, such as order=4711, whose content is not deleted yet.", default=None
    )
    status: Status | None = field(one_of(Status), "Only emails with this status.", default=None)
    delivery: str | None = field(
        DELIVERY,
        "Only emails of which providers reported this: `none` (nothing yet), `bounced` (every kind), or a state.",
        default=None,
    )
    error_type: Reason | None = field(one_of(Reason), "Only emails with this error type.", default=None)
    text: str | None = field(
        FILTER_TEXT, "Only emails whose last error contains this text; case does not matter.", default=None
    )
    channel: str | None = field(FILTER_TEXT, "Only this channel: `email`, `sms` or `test`.", default=None)
    provider: str | None = field(FILTER_TEXT, "Only emails whose last attempt used this provider.", default=None)
    correlation_id: str | None = field(FILTER_TEXT, "Only emails with this correlation id.", default=None)
    tenant_id: str | None = field(TENANT, "Only this tenant.", default=None)
    lane: str | None = field(FILTER_TEXT, "Only emails of this lane.", default=None)
    created_from: datetime | None = field(
        SINCE,
        "Only emails created at this time or later: an age such as 2h or 7d, or a time such as 2026-11-24T18:00Z.",
        default=None,
        option="--since",
    )
    created_before: datetime | None = field(
        SINCE, "Only emails created before this time, or longer ago than this age.", default=None, option="--until"
    )
    limit: int = field(whole(1, MAX_EMAILS), "The most emails.", default=50)

    plural = "emails"
    nothing = "No email matches."
    examples = (
        "find --to ann@example.org --tag receipt --since 7d",
        "find --domain example.org --status failed --since 1h",
        "find --delivery bounced --tenant shop --since 7d",
        "find --metadata order=4711",
        "find --to +4915112345678",
        "find --from @shop.example --provider ses --until 2026-11-24T18:00:00+01:00",
        "find --to ann@example.org --json | jq -r '.emails[].id'",
    )

    def check(self, settings: Any) -> None:
        del settings
        if self.created_from and self.created_before and self.created_before <= self.created_from:
            raise Mistakes([Mistake("created_before", "must be later than the beginning of the period")])

    async def run(self, source: Any, parameters: Mapping[str, Any]) -> Any:
        from dispatcher.ops.lookup import find

        page = {"after": parameters["after_email_id"], "sees_content": parameters["sees_content"]}
        found = await find(source, self.values(), limit=self.limit, **page)
        cursor = None if found.next is None else cursor_text([found.next])
        return FoundPage(found.rows, cursor, found.was_cut, found.recipients_since)


ACTIONS = (ListEmails,)
