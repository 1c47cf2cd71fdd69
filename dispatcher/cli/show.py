"""`dispatcher show`: shows the full history of one email, or the bytes of one poison message."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from dispatcher.cli.environment import load_settings
from dispatcher.cli.exits import Exit
from dispatcher.cli.options import audit_options, json_option
from dispatcher.cli.output import counted, print_data, print_json, say
from dispatcher.cli.sessions import open_dlq, run_with_dlq, run_with_session
from dispatcher.cli.table import Table
from dispatcher.domain.poison_id import is_poison_id
from dispatcher.errors import DispatcherError

if TYPE_CHECKING:
    from dispatcher.domain.waiting import WaitExplanation
    from dispatcher.ops.acts import Act
    from dispatcher.ops.email_history import DeadLetterMessage, EmailHistory
    from dispatcher.store.connections import AsyncSession

_SHOWN_OCTETS: Final = 4096
_HEX_WIDTH: Final = 16


@click.command("show")
@click.argument("name", metavar="ID|KEY|p-…")
@click.option("--tenant", "tenant_id", help="The tenant of KEY.  [default: all tenants]")
@click.option("--no-queue", is_flag=True, help="Do not search the DLQ for the email's dead letter.")
@click.option(
    "--reveal",
    is_flag=True,
    help="Also show the email's content and addresses; needs --reason, and adds an entry to the audit log.",
)
@audit_options(
    is_required=False,
    reason="With --reveal: the reason, for the audit log.",
    actor="With --reveal: the operator's name for the audit log.  [default: the system's user@host]",
)
@click.option("--hex", "as_hex", is_flag=True, help="Show a poison message's bytes in hexadecimal.")
@click.option(
    "--export",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write a poison message's bytes to a new file.",
)
@json_option()
def command(
    name: str,
    tenant_id: str | None,
    no_queue: bool,
    reveal: bool,
    act: Act | None,
    as_hex: bool,
    export: Path | None,
    as_json: bool,
) -> int:
    """Show the full history of one email, or the bytes of a poison message.

    \b
    Examples:
      dispatcher show 0198c2f4-…
      dispatcher show order-17-receipt --tenant shop
      dispatcher show order-17-receipt --reveal --reason "ticket 4711"
      dispatcher show p-3fa9c1d2e0b4 --export message.bin

    Give the email's id or its message key. If several tenants have an email with this key, the command lists these
    tenants; add --tenant. (To find an email by its recipient, use `dispatcher find`.) Or give the id of a poison
    message (p-…): `dispatcher dlq list --poison` shows these ids. A poison message is a message on the DLQ that points
    to no email.

    For an email, the command shows the status, and why the email is not sent yet; a timeline of everything that
    happened to the email; every attempt; events from providers; operators' actions; and replays. It also shows the
    email's dead letter on the DLQ, with RabbitMQ's x-death header.

    `dispatcher show` and `dispatcher dlq show` are the same command.

    Exit codes: 0 shown; 1 there is no such email or message; 3 shown, but the DLQ could not be read.
    """
    if is_poison_id(name):
        return _show_poison(name, as_hex=as_hex, export=export, as_json=as_json)
    if reveal and not act:
        raise click.UsageError("--reveal needs --reason, which goes into the audit log.")
    settings = load_settings("database_url", *(() if no_queue else ("amqp_url",)))

    async def find(session: AsyncSession) -> tuple[EmailHistory, list[DeadLetterMessage] | None, str | None]:
        from dispatcher.ops.email_history import find_history, find_messages
        from dispatcher.ops.names import find_id

        email_id = await find_id(session, name, tenant_id=tenant_id)
        story = await find_history(
            session,
            email_id,
            providers=settings.providers,
            rules=settings.account_rules,
            lease_seconds=settings.lease_seconds,
            reveal=act if reveal else None,
        )
        if story is None:
            remedy = "Give the email's id or its message key."
            raise DispatcherError(f"There is no email {name!r}.", remedy=remedy)
        if no_queue:
            return story, None, None
        try:
            async with open_dlq(settings, "show") as dlq:
                return story, await find_messages(session, dlq, email_id), None
        except DispatcherError as error:
            return story, None, str(error)

    story, messages, fault = run_with_session("show", find, settings)
    if as_json:
        print_json(_document(story, messages))
    else:
        _show(story, messages)
    if fault:
        say(f"The DLQ could not be read: {fault}")
        return Exit.PARTLY
    return Exit.DONE


def _document(story: EmailHistory, messages: list[DeadLetterMessage] | None) -> dict[str, Any]:
    """The document of HTTP, with what only operators see: all columns, workers, actors, and the dead letters."""
    from dispatcher.ops.email_history import status_of

    whole = {**asdict(story.email), **asdict(status_of(story)), **asdict(story), "timeline": story.timeline}
    del whole["email"], whole["email_id"]
    whole["last_error"] = whole["error"]  # the column also has the answers of providers
    if story.content is None:
        del whole["content"]
    return {**whole, "dlq": messages}


def _show(story: EmailHistory, messages: list[DeadLetterMessage] | None) -> None:
    from dispatcher.domain.email_history import columns, facts

    waits = {} if story.waiting is None else {"waits": _wait(story.waiting)}
    _show_fields({**facts(story.email), "metadata": story.metadata, **waits})
    tables = {heading: [asdict(each) for each in rows] for heading, rows in story.tables.items()}
    if messages is not None:
        tables["on the DLQ"] = [_message(each) for each in messages]
    for heading, records in tables.items():
        print_data(f"\n{heading}" if records else f"\n{heading}: none")
        labels, rows = columns(records)
        table = Table(*labels)
        for row in rows:
            table.add(*map(_text, row))
        if rows:
            table.show()
    if story.content:
        print_data("\ncontent")
        _show_fields(story.content)


def _wait(waiting: WaitExplanation) -> str:
    if waiting.because is not None:
        return f"until {_text(waiting.until)} because {waiting.because}"
    until = "" if waiting.until is None else f", until {_text(waiting.until)}"
    return f"{waiting.reason.replace('_', ' ')}{until}: {waiting.detail}"


def _message(message: DeadLetterMessage) -> dict[str, Any]:
    return {
        "position": message.position + 1,
        "refers to": "an earlier failure" if message.is_stale else "the current failure",
        "failed": message.failed_at,
        "attempts": message.attempts,
        "headers": {name: value for name, value in message.headers.items() if name != "x-delivery-count"},
        "x-death": message.x_death,
    }


def _show_fields(record: Mapping[str, Any]) -> None:
    from dispatcher.domain.email_history import label

    table = Table()
    for name, value in record.items():
        if value not in (None, [], {}):
            table.add(label(name), _text(value))
    table.show()


def _text(value: Any) -> str:
    if value is None or value in ({}, []):
        return "-"
    if isinstance(value, datetime):
        return value.astimezone().isoformat(sep=" ", timespec="milliseconds")
    if isinstance(value, dict):
        return ", ".join(f"{name}={_text(inner)}" for name, inner in value.items())
    if isinstance(value, list):
        return "; ".join(_text(inner) for inner in value)
    return str(value)


def _show_poison(name: str, *, as_hex: bool, export: Path | None, as_json: bool) -> int:
    from dispatcher.ops.poison import find_poison
    from dispatcher.ops.safe_text import safe_text

    poison = run_with_dlq("show", lambda session, dlq: find_poison(session, dlq, name))
    if export:
        _write(export, poison.body)
        say(f"Wrote {counted(len(poison.body), 'byte')} to {export}.")
    shown = _hexadecimal(poison.body[:_SHOWN_OCTETS]) if as_hex else safe_text(poison.body, _SHOWN_OCTETS)
    if as_json:
        print_json({**asdict(poison), "octets": len(poison.body), "body": shown})
        return Exit.DONE
    headers = {name: value for name, value in poison.headers.items() if name != "x-delivery-count"}
    fields = {"message": poison.poison_id, "position": poison.position + 1, "problem": poison.problem}
    _show_fields({**fields, "headers": headers, "x-death": poison.x_death, "bytes": len(poison.body)})
    print_data(f"\n{shown}")
    return Exit.DONE


def _write(path: Path, body: bytes) -> None:
    try:
        with path.open("xb") as file:
            file.write(body)
    except OSError as error:
        raise DispatcherError(f"{path} cannot be written: {(error.strerror or 'unknown').lower()}.") from error


def _hexadecimal(body: bytes) -> str:
    lines = []
    for at in range(0, len(body), _HEX_WIDTH):
        part = body[at : at + _HEX_WIDTH]
        text = "".join(chr(octet) if 32 <= octet < 127 else "." for octet in part)
        lines.append(f"{at:08x}  {part.hex(' '):<{3 * _HEX_WIDTH}} {text}")
    return "\n".join(lines)
