"""`dispatcher keys create|list|revoke`: who may use the HTTP API."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final

import click

from dispatcher.cli.acting import json_option
from dispatcher.cli.environment import load_settings
from dispatcher.cli.exits import Exit
from dispatcher.cli.output import print_data, print_json, say
from dispatcher.cli.table import Table
from dispatcher.domain.api_key import Scope, Secret, shown
from dispatcher.domain.email_rules import tenant
from dispatcher.errors import DispatcherError, InvalidEmail

if TYPE_CHECKING:
    from dispatcher.store.connections import Session

MAX_NAME_CHARACTERS: Final = 100
_NEVER_ANY: Final = (
    "There has never been a key: `dispatcher api` does not start; with DISPATCHER_API_ALLOW_ANONYMOUS=on it serves "
    "every request on the loopback without one. `dispatcher keys create --help` says how to create a key."
)
_NONE_LEFT: Final = (
    "Every key is revoked: `dispatcher api` refuses every request. It does not start again without another key; "
    "`--all` lists the revoked ones, and `dispatcher keys create --help` tells how to make one."
)


@click.group("keys")
def command() -> None:
    """Make, list and revoke the HTTP API's keys.

    Every request needs one, and `dispatcher api` does not start without one; except for development: with
    DISPATCHER_API_ALLOW_ANONYMOUS=on, whoever reaches it on the loopback may do everything until there is a first key.

    \b
    Examples:
      dispatcher keys create --name shop --from-domain example.com
      dispatcher keys list
      dispatcher keys revoke ed_k3v9q0xw2m7a
    """


@command.command("create")
@click.option("--name", required=True, help="What uses it, for the list.")
@click.option("--tenant", "tenant_id", default="default", show_default=True, help="Whose emails it sends and sees.")
@click.option(
    "--scope",
    "scopes",
    type=click.Choice([scope.value for scope in Scope]),
    multiple=True,
    default=("send", "read"),
    show_default=True,
    help="What it may: send, read, operate (replay, settle held emails); may be repeated.",
)
@click.option("--from-domain", "domains", multiple=True, metavar="DOMAIN", help="May send from it; may be repeated.")
@click.option("--from-address", "addresses", multiple=True, metavar="ADDRESS", help="The same for one address.")
@click.option("--from-anywhere", is_flag=True, help="May send from any address.")
@click.option(
    "--per-second",
    type=click.FloatRange(0.1, 1_000_000),
    metavar="N",
    help="Requests per second, an email of a batch counting as one; each API process counts by itself.",
)
@click.option(
    "--recipients-per-day",
    type=click.IntRange(1, 2_000_000_000),
    metavar="N",
    help="Recipients per day (UTC), over all API processes.",
)
@json_option()
def create(*, as_json: bool, **options: Any) -> int:
    """Make a key and print it, this once: only its hash is kept.

    \b
    Examples:
      dispatcher keys create --name shop --from-domain example.com
      dispatcher keys create --name dashboard --scope read
      dispatcher keys create --name shop --from-address no-reply@example.com --per-second 50 --recipients-per-day 10000
    """
    from dispatcher.store.api_keys import insert_key

    values = _values(options)
    key = Secret.new()
    with _connected() as connection:
        insert_key(connection, values | {"key_id": key.key_id, "secret_hash": key.hashed()})
    if as_json:
        print_json({"key_id": shown(key.key_id), "key": key.text(), "tenant_id": values["tenant_id"]})
    else:
        print_data(key.text())
        say("Keep it now: it is not shown again. Give it to the API as `Authorization: Bearer …`.")
    return Exit.DONE


def _connected() -> AbstractContextManager[Session]:
    from dispatcher.store.connections import connected

    return connected(load_settings("database_url").database_url, name="dispatcher keys")


def _values(options: dict[str, Any]) -> dict[str, Any]:
    """The new key's columns.

    Raises:
        UsageError: the options make no sense.
    """
    name = options["name"]
    if not 1 <= len(name) <= MAX_NAME_CHARACTERS or not name.isprintable():
        raise click.UsageError(f"--name must have 1 to {MAX_NAME_CHARACTERS} characters that print.")
    try:
        tenant(options["tenant_id"])
    except InvalidEmail as error:
        raise click.UsageError(f"--tenant {error.reason}.") from None
    domains, addresses = _senders(options)
    return {
        "name": name,
        "tenant_id": options["tenant_id"],
        "scopes": sorted(set(options["scopes"])),
        "sender_domains": domains,
        "sender_addresses": addresses,
        "requests_per_second": options["per_second"],
        "recipients_per_day": options["recipients_per_day"],
    }


def _senders(options: dict[str, Any]) -> tuple[list[str] | None, list[str] | None]:
    """The domains and addresses that it may send from, in the form in which they are compared; both None for any."""
    domains, addresses = options["domains"], options["addresses"]
    if options["from_anywhere"]:
        if domains or addresses:
            raise click.UsageError("--from-anywhere takes no --from-domain or --from-address beside it.")
        return None, None
    if not (domains or addresses) and "send" in options["scopes"]:
        raise click.UsageError(
            "A key that may send needs --from-domain or --from-address: what it may send from. (--from-anywhere lets "
            "it send in anybody's name.)"
        )
    return [_comparable("domain", text) for text in domains], [_comparable("address", text) for text in addresses]


def _comparable(kind: str, text: str) -> str:
    from dispatcher.api.senders import comparable_address

    before = "x@" if kind == "domain" else ""
    try:
        return comparable_address(before + text).removeprefix(before)
    except ValueError as error:
        raise click.UsageError(f"--from-{kind} {text!r} {error}.") from None


@command.command("list")
@click.option("--all", "with_revoked", is_flag=True, help="Revoked ones, too.")
@json_option()
def list_(*, with_revoked: bool, as_json: bool) -> int:
    """List the keys: their beginnings, never their secrets."""
    from dispatcher.store.api_keys import list_keys

    with _connected() as connection:
        all_keys = list_keys(connection)
    keys = [key for key in all_keys if with_revoked or key.revoked_at is None]
    if as_json:
        print_json([_document(key) for key in keys])
    elif keys:
        table = Table("key", "name", "tenant", "scopes", "from", "per second", "recipients a day", "created")
        for key in keys:
            table.add(*_row(key))
        table.show()
    else:
        say(_NONE_LEFT if all_keys else _NEVER_ANY)
    return Exit.DONE


def _document(key: Any) -> dict[str, Any]:
    return {
        "key_id": shown(key.key_id),
        "name": key.name,
        "tenant_id": key.tenant_id,
        "scopes": sorted(key.scopes),
        "from_domains": None if key.sender_domains is None else sorted(key.sender_domains),
        "from_addresses": None if key.sender_addresses is None else sorted(key.sender_addresses),
        "per_second": key.requests_per_second,
        "recipients_per_day": key.recipients_per_day,
        "created_at": key.created_at,
        "revoked_at": key.revoked_at,
    }


def _row(key: Any) -> list[str]:
    senders = None if key.sender_domains is None else sorted({*key.sender_domains, *(key.sender_addresses or ())})
    created = f"{key.created_at:%Y-%m-%d %H:%M}" + (" (revoked)" if key.revoked_at else "")
    limits = ["-" if limit is None else f"{limit:g}" for limit in (key.requests_per_second, key.recipients_per_day)]
    names = [shown(key.key_id), key.name, key.tenant_id, " ".join(sorted(key.scopes))]
    return [*names, "anywhere" if senders is None else ", ".join(senders) or "-", *limits, created]


@command.command("revoke")
@click.argument("key_id")
def revoke(key_id: str) -> int:
    """End a key, named as the list shows it. Running API processes refuse it within some seconds."""
    from dispatcher.store.api_keys import revoke_key

    # Who pastes the whole key means its beginning; nobody else sees the rest of it.
    bare = key_id.removeprefix("ed_").partition("_")[0]
    with _connected() as connection:
        if not revoke_key(connection, bare):
            raise DispatcherError("There is no such key that is alive.", remedy="`dispatcher keys list` shows them.")
    say(f"{shown(bare)} is revoked.")
    return Exit.DONE
