"""`dispatcher show`: shows the full history of one email, or the bytes of one poison message."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from dispatcher.cli.environment import load_settings
from dispatcher.cli.exits import Exit
from dispatcher.cli.history_page import document, fields_table, show_history
from dispatcher.cli.options import audit_options, json_option
from dispatcher.cli.output import counted, print_data, print_json, say
from dispatcher.cli.sessions import open_dlq, run_with_dlq, run_with_session
from dispatcher.domain.poison_id import is_poison_id
from dispatcher.errors import DispatcherError

if TYPE_CHECKING:
    from dispatcher.ops.acts import Act
    from dispatcher.ops.email_history import EmailHistory
    from dispatcher.ops.messages import DeadLetterMessage
    from dispatcher.store.connections import AsyncSession

_SHOWN_OCTETS: Final = 4096
_HEX_WIDTH: Final = 16


@click.command("show")
@click.argument("name", metavar="ID|KEY|p-…")
@click.option("--tenant", "tenant_id", default="default", show_default=True, help="The tenant that KEY belongs to.")
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
    tenant_id: str,
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

    Give the email's id or its message key. (To find an email by its recipient, use `dispatcher find`.) Or give the id
    of a poison message (p-…): `dispatcher dlq list --poison` shows these ids. A poison message is a message on the DLQ
    that points to no email.

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
        from dispatcher.ops.email_history import find_history
        from dispatcher.ops.names import find_ids

        (email_id,) = await find_ids(session, tenant_id, [name])
        providers, lease_seconds, shown = settings.providers, settings.lease_seconds, act if reveal else None
        story = await find_history(session, email_id, providers=providers, lease_seconds=lease_seconds, reveal=shown)
        if story is None:
            remedy = "Give the email's id, or its message key and --tenant."
            raise DispatcherError(f"There is no email {name!r}.", remedy=remedy)
        if no_queue:
            return story, None, None
        try:
            from dispatcher.ops.messages import find_messages

            async with open_dlq(settings, "show") as dlq:
                return story, await find_messages(session, dlq, email_id), None
        except DispatcherError as error:
            return story, None, str(error)

    story, messages, fault = run_with_session("show", find, settings)
    if as_json:
        print_json(document(story, messages))
    else:
        show_history(story, messages)
    if fault:
        say(f"The DLQ could not be read: {fault}")
        return Exit.PARTLY
    return Exit.DONE


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
    fields_table({**fields, "headers": headers, "x-death": poison.x_death, "bytes": len(poison.body)}).show()
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
