"""`dispatcher dlq show`: one email's whole story, or one poison message's bytes."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from dispatcher.cli.acting import opened_dlq, opened_session
from dispatcher.cli.environment import load_settings
from dispatcher.cli.exits import Exit
from dispatcher.cli.output import print_data, print_json, say
from dispatcher.cli.selecting import DEFAULT_TENANT
from dispatcher.cli.story_page import fields_table, show_story
from dispatcher.domain.poison_id import is_poison_id
from dispatcher.errors import DispatcherError

if TYPE_CHECKING:
    from dispatcher.config import Settings
    from dispatcher.ops.acts import Act
    from dispatcher.ops.messages import Message
    from dispatcher.ops.poison import Poison
    from dispatcher.ops.stories import Story
    from dispatcher.store.connections import AsyncSession

_SHOWN_OCTETS: Final = 4096
_HEX_WIDTH: Final = 16


@click.command("show")
@click.argument("name", metavar="ID|KEY|p-…")
@click.option("--tenant", "tenant_id", default=DEFAULT_TENANT, show_default=True, help="Whose message key it is.")
@click.option("--no-queue", is_flag=True, help="Do not look for its message on the DLQ.")
@click.option("--reveal", is_flag=True, help="Show its content and addresses, too; needs --reason and is on record.")
@click.option("--reason", metavar="TEXT", help="Why you have to see its content.")
@click.option("--actor", metavar="NAME", help="Who looks at its content; the system's user@host if not said.")
@click.option("--hex", "as_hex", is_flag=True, help="A poison message's bytes in hexadecimal.")
@click.option(
    "--export",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write a poison message's bytes to a new file.",
)
@click.option("--json", "as_json", is_flag=True, help="One line of JSON.")
def command(
    name: str,
    tenant_id: str,
    no_queue: bool,
    reveal: bool,
    reason: str | None,
    actor: str | None,
    as_hex: bool,
    export: Path | None,
    as_json: bool,
) -> int:
    """Show everything about one email, by its id or its message key: its status, why it waits if it is pending or
    sending, every attempt, operators' acts, replays, and its message on the DLQ with x-death. For a poison message,
    show the bytes.

    \b
    Examples:
      dispatcher dlq show 0198c2f4-…
      dispatcher dlq show order-17-receipt --tenant shop
      dispatcher dlq show order-17-receipt --reveal --reason "ticket 4711"
      dispatcher dlq show p-3fa9c1d2e0b4 --export message.bin

    Exit codes: 0 it is there, 1 it is not, 3 the DLQ could not be looked into.
    """
    if is_poison_id(name):
        poison = asyncio.run(_find_poison(load_settings("database_url", "amqp_url"), name))
        return _show_poison(poison, as_hex=as_hex, export=export, as_json=as_json)
    if reveal and not reason:
        raise click.UsageError("--reveal needs a --reason: it goes on record.")
    settings = load_settings("database_url", *(() if no_queue else ("amqp_url",)))
    story, messages, fault = asyncio.run(_find(settings, name, tenant_id, _act(actor, reason, reveal), not no_queue))
    if as_json:
        print_json(_json(story, messages))
    else:
        show_story(story, messages)
    if fault:
        say(f"The DLQ could not be looked into: {fault}")
        return Exit.PARTLY
    return Exit.DONE


def _act(actor: str | None, reason: str | None, reveal: bool) -> Act | None:
    if not reveal:
        return None
    from dispatcher.ops.acts import Act

    return Act.of(actor, reason or "")


async def _find(
    settings: Settings, name: str, tenant_id: str, reveal: Act | None, with_queue: bool
) -> tuple[Story, list[Message] | None, str | None]:
    async with opened_session(settings, "dlq") as session:
        story = await _find_story(session, settings, name, tenant_id, reveal)
        if story is None:
            raise DispatcherError(
                f"There is no email {name!r}.", remedy="Give its id, or its message key with its --tenant."
            )
        if not with_queue:
            return story, None, None
        try:
            from dispatcher.ops.messages import find_messages

            async with opened_dlq(settings, "dlq") as dlq:
                return story, await find_messages(session, dlq, story.email["email_id"]), None
        except DispatcherError as error:
            return story, None, str(error)


async def _find_story(
    session: AsyncSession, settings: Settings, name: str, tenant_id: str, reveal: Act | None
) -> Story | None:
    from dispatcher.ops.names import find_ids
    from dispatcher.ops.stories import tell

    (email_id,) = await find_ids(session, tenant_id, [name])
    providers, lease_seconds = settings.providers, settings.lease_seconds
    return await tell(session, email_id, providers=providers, lease_seconds=lease_seconds, reveal=reveal)


async def _find_poison(settings: Settings, name: str) -> Poison:
    from dispatcher.ops.poison import list_poison

    async with opened_session(settings, "dlq") as session, opened_dlq(settings, "dlq") as dlq:
        for each in await list_poison(session, dlq):
            if each.poison_id == name:
                return each
    raise DispatcherError(f"The DLQ holds no message {name}.", remedy="`dispatcher dlq list --poison` lists them.")


def _json(story: Story, messages: list[Message] | None) -> dict[str, Any]:
    told = {
        "email": story.email,
        "waiting": story.waiting and asdict(story.waiting),
        "attempts": story.attempts,
        "acts": story.acts,
        "replays": story.replays,
        "dlq": None if messages is None else [asdict(message) for message in messages],
    }
    return told if story.content is None else {**told, "content": story.content}


def _show_poison(poison: Poison, *, as_hex: bool, export: Path | None, as_json: bool) -> int:
    from dispatcher.ops.plain import safe_text

    if export:
        _write(export, poison.body)
        say(f"{len(poison.body):,} octets are in {export}.")
    shown = _hexadecimal(poison.body[:_SHOWN_OCTETS]) if as_hex else safe_text(poison.body, _SHOWN_OCTETS)
    if as_json:
        print_json({**asdict(poison), "octets": len(poison.body), "body": shown})
        return Exit.DONE
    headers = {name: value for name, value in poison.headers.items() if name != "x-delivery-count"}
    words = {"message": poison.poison_id, "place": poison.position + 1, "problem": poison.problem}
    fields_table({**words, "headers": headers, "x-death": poison.x_death, "octets": len(poison.body)}).show()
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
