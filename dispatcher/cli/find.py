"""`dispatcher find`: finds emails by recipient, domain, tag, sender, status and time."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

import click

from dispatcher.cli.exits import Exit
from dispatcher.cli.filter_options import Age, Instant, NonBlankText, ProviderName
from dispatcher.cli.options import json_option
from dispatcher.cli.output import counted, print_json, say
from dispatcher.cli.sessions import run_with_session
from dispatcher.cli.table import Table
from dispatcher.domain.outcome import Reason
from dispatcher.domain.status import Status
from dispatcher.domain.suppression import Recipient
from dispatcher.errors import InvalidEmail

if TYPE_CHECKING:
    from dispatcher.ops.lookup import FoundPage
    from dispatcher.store.connections import AsyncSession

_MAX_LIMIT: Final = 1_000


class PastInstant(click.ParamType[datetime]):
    """An instant, given as a length of time before now, such as `2d`, or as a date and time with a zone."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> datetime:
        """The instant. A length of time is subtracted from the current time."""
        if isinstance(value, datetime):
            return value
        text = str(value).strip()
        if text[-1:].isalpha() and "T" not in text:
            return datetime.now(UTC) - timedelta(seconds=Age().convert(text, param, ctx))
        return Instant().convert(text, param, ctx)


class Whom(click.ParamType[str]):
    """A recipient or sender: an address or a domain. Error messages do not repeat the address or domain."""

    name = "recipient"

    def __init__(self, *, addresses: bool, domains: bool) -> None:
        self._addresses = addresses
        self._domains = domains

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The text, unchanged."""
        try:
            found = Recipient.parse(str(value) if self._addresses or "@" in str(value) else f"@{value}")
        except InvalidEmail as error:
            self.fail(f"{error.reason}.", param, ctx)
        if found.is_domain and not self._domains:
            self.fail("the text is not an address. To search for a domain, use --domain.", param, ctx)
        if not found.is_domain and not self._addresses:
            self.fail("the text is not a domain. To search for an address, use --to.", param, ctx)
        return str(value)


@click.command("find")
@click.option(
    "--to",
    "recipient",
    type=Whom(addresses=True, domains=False),
    metavar="ADDRESS",
    help="Only emails to this address, in To, Cc or Bcc. Case does not matter.",
)
@click.option(
    "--domain",
    type=Whom(addresses=False, domains=True),
    metavar="DOMAIN",
    help="Only emails with a recipient in this domain, such as example.org.",
)
@click.option(
    "--from",
    "sender",
    type=Whom(addresses=True, domains=True),
    metavar="ADDRESS|@DOMAIN",
    help="Only emails from this address or domain. Emails whose content was deleted are not found.",
)
@click.option("--correlation-id", type=NonBlankText(), metavar="ID", help="Only emails with this correlation id.")
@click.option(
    "--tag",
    type=NonBlankText(),
    metavar="TAG",
    help="Only emails with this tag. Emails whose content was deleted are not found.",
)
@click.option("--status", type=click.Choice([status.value for status in Status]), help="Only this status.")
@click.option(
    "--since",
    type=PastInstant(),
    metavar="AGE|TIME",
    help="Only emails enqueued since this time: an age such as 2h or 7d, or a time such as 2026-11-24T18:00Z.",
)
@click.option(
    "--until",
    type=PastInstant(),
    metavar="AGE|TIME",
    help="Only emails enqueued before this time. Write the time as in --since.",
)
@click.option(
    "--provider", type=ProviderName(), metavar="NAME", help="Only emails whose last attempt used this provider."
)
@click.option(
    "--error-type", type=click.Choice([reason.value for reason in Reason]), metavar="TYPE", help="Only this error type."
)
@click.option("--tenant", "tenant_id", type=NonBlankText(), metavar="ID", help="Only this tenant.  [default: all]")
@click.option("--lane", type=NonBlankText(), metavar="NAME", help="Only this lane.")
@click.option("--channel", type=NonBlankText(), metavar="NAME", help="Only this channel: email or sms.")
@click.option(
    "--limit", type=click.IntRange(1, _MAX_LIMIT), metavar="N", default=50, show_default=True, help="Emails per page."
)
@click.option(
    "--cursor",
    type=click.UUID,
    metavar="ID",
    help="Show the page that begins at this cursor. Each page ends with the cursor of the next page.",
)
@json_option()
def command(status: str | None, limit: int, cursor: UUID | None, as_json: bool, **filters: Any) -> int:
    """Find emails, whatever their status, newest first.

    \b
    Examples:
      dispatcher find --to ann@example.org     # Ann says that she got no receipt
      dispatcher find --to ann@example.org --tag receipt --since 7d
      dispatcher find --domain example.org --status failed --since 1h
      dispatcher find --to +4915112345678      # the SMS to this number
      dispatcher find --correlation-id order-17
      dispatcher find --from @shop.example --provider ses --until 2026-11-24T18:00:00+01:00
      dispatcher find --to ann@example.org --json | jq -r '.emails[].email_id'
      dispatcher show ID                       # everything about one email

    The command finds the emails that match all filters, and shows their recipients masked.

    --to and --domain compare keyed hashes of the recipients. These hashes are kept as long as the email's row. There is
    one exception: if the email has `erase_after_sending`, the hashes are erased together with the content. The sender
    and the tags of every email are deleted together with its content: by default, after 30 days.

    For each page, the command reads a limited number of emails. If it reaches this limit before it has found --limit
    emails, the page ends early, and `was_cut` is true. --cursor continues the search.

    An early release stored no hashes, so --to and --domain do not find its emails. If the database still has such
    emails, --to and --domain find only emails that were enqueued at `recipients_since` or later. `recipients_since` is
    null if the database has no such emails, or if the search uses neither --to nor --domain.

    \b
    JSON: {"emails": [{"email_id": …, "status": …, "recipients": ["a•••@example.org"], …}], "next_cursor": null,
           "was_cut": false, "recipients_since": null}

    Exit codes: 0 the page has emails, or the search is not finished (--cursor continues it); 1 no email matches.
    """
    from dispatcher.ops.lookup import EmailQuery, find, masked_recipients

    query = EmailQuery(status=Status(status) if status else None, **filters)

    async def search(session: AsyncSession) -> tuple[FoundPage, dict[UUID, list[str]]]:
        page = await find(session, query, limit=limit, cursor=cursor)
        return page, await masked_recipients(session, [row.email_id for row in page.rows])

    page, recipients = run_with_session("find", search)
    if as_json:
        emails = [{**asdict(row), "recipients": recipients.get(row.email_id)} for row in page.rows]
        print_json(
            {
                "emails": emails,
                "next_cursor": page.cursor,
                "was_cut": page.was_cut,
                "recipients_since": page.recipients_since,
            }
        )
    else:
        _show(page, recipients)
    return Exit.DONE if page.rows or page.cursor else Exit.FAILED


def _show(page: FoundPage, recipients: dict[UUID, list[str]]) -> None:
    if page.rows:
        table = Table("email", "enqueued", "status", "to", "error type", "provider", "attempts", "tenant", "key")
        for row in page.rows:
            to = ", ".join(recipients.get(row.email_id, [])) or None
            state = (row.error_type, row.provider, row.attempt_count)
            table.add(row.email_id, row.created_at, row.status, to, *state, row.tenant_id, row.message_key)
        table.show()
    if page.was_cut:
        say(
            f"{counted(len(page.rows), 'email')} so far. The page ended early, because it reads a limited number of "
            "emails. To make the search faster, add --since."
        )
    elif page.rows:
        say(f"{counted(len(page.rows), 'email')}.")
    else:
        say("No email matches.")
    if page.cursor is not None:
        say(f"Next page: --cursor {page.cursor}")
    if page.recipients_since is not None:
        since = page.recipients_since.astimezone().isoformat(sep=" ", timespec="seconds")
        why = "an early release stored no hashes of recipients"
        say(f"Emails that were enqueued before {since} are not found by recipient: {why}.")
