"""`dispatcher keys create|list|revoke`: manages the keys of the HTTP API."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final

import click

from dispatcher.cli.environment import load_settings
from dispatcher.cli.exits import Exit
from dispatcher.cli.options import Number, audit_options, json_option, known_lane, made_act
from dispatcher.cli.output import print_data, print_json, say
from dispatcher.cli.sessions import run_with_session
from dispatcher.cli.table import Table
from dispatcher.domain.api_key import Scope, Secret, shown
from dispatcher.domain.email_rules import tenant
from dispatcher.errors import InvalidEmail

if TYPE_CHECKING:
    from dispatcher.ops.acts import Act
    from dispatcher.store.connections import Session

MAX_NAME_CHARACTERS: Final = 100
_DEFAULT: Final = click.core.ParameterSource.DEFAULT
_NEVER_ANY: Final = (
    "No key was ever created, so `dispatcher api` does not start. (With DISPATCHER_API_ALLOW_ANONYMOUS=on it starts, "
    "listens on the loopback interface only, and allows every request.) To create a key, see "
    "`dispatcher keys create --help`."
)
_NONE_LEFT: Final = (
    "Every key is revoked, so `dispatcher api` refuses every request and does not start again. `dispatcher keys list "
    "--all` lists the revoked keys. To create a key, see `dispatcher keys create --help`."
)


@click.group("keys")
def command() -> None:
    """Create, list and revoke the HTTP API's keys.

    \b
    Examples:
      dispatcher keys create --name shop --from-domain example.com
      dispatcher keys list
      dispatcher keys revoke ed_k3v9q0xw2m7a

    Every request needs a key, and `dispatcher api` does not start without one. The exception is for development: with
    DISPATCHER_API_ALLOW_ANONYMOUS=on, requests on the loopback interface need no key until the first key is created.
    """


@command.command("create")
@click.option(
    "--name", required=True, help="The application or operator that uses the key. `keys list` shows this name."
)
@click.option(
    "--tenant",
    "tenant_id",
    default="default",
    show_default=True,
    help="The tenant whose emails the key sends and reads.",
)
@click.option(
    "--all-tenants",
    is_flag=True,
    help="The key acts for every tenant. In the HTTP API, each request with such a key must contain a tenant_id. An "
    "operator who signs in to the page at /ops with such a key sees all tenants.",
)
@click.option(
    "--scope",
    "scopes",
    type=click.Choice([scope.value for scope in Scope]),
    multiple=True,
    default=("send", "read"),
    show_default=True,
    help="An action that the key allows. send: enqueue emails. read: read the status of emails. operate: cancel, "
    "replay, confirm or release emails, and suppress recipients. ignore_suppression: with the scope send, "
    "enqueue emails that are sent to suppressed recipients, too. Repeatable.",
)
@click.option(
    "--from-domain",
    "domains",
    multiple=True,
    metavar="DOMAIN",
    help="Allow sender addresses of this domain. Repeatable.",
)
@click.option(
    "--from-address", "addresses", multiple=True, metavar="ADDRESS", help="Allow this sender address. Repeatable."
)
@click.option("--from-anywhere", is_flag=True, help="Allow any sender address.")
@click.option(
    "--per-second",
    type=Number(0.1, 1_000_000),
    metavar="N",
    help="Allow at most N requests per second in each API process; each email of a batch counts as one request.  "
    "[default: no limit]",
)
@click.option(
    "--recipients-per-day",
    type=click.IntRange(1, 2_000_000_000),
    metavar="N",
    help="Allow at most N recipients per UTC day, in all API processes together.  [default: no limit]",
)
@click.option(
    "--lane",
    help="The lane of emails that do not name a lane.  [default: the sender's lane (see `lanes set`), or normal]",
)
@click.option(
    "--allow-lane",
    "allowed_lanes",
    multiple=True,
    metavar="LANE",
    help="Allow emails to name this lane, in addition to the lane of --lane. Repeatable.",
)
@json_option()
def create(*, as_json: bool, **options: Any) -> int:
    """Create a key and print it. It is never shown again: only its hash is stored.

    \b
    Examples:
      dispatcher keys create --name shop --from-domain example.com
      dispatcher keys create --name login --from-address otp@example.com --lane urgent
      dispatcher keys create --name dashboard --scope read
      dispatcher keys create --name ann --all-tenants --scope operate
      dispatcher keys create --name shop --from-address no-reply@example.com --per-second 50 --recipients-per-day 10000

    The scope send needs --from-domain, --from-address or --from-anywhere.
    """
    from dispatcher.store.api_keys import insert_key

    values = _values(options)
    key = Secret.new()
    with _connected() as connection:
        insert_key.sync(connection, **values, key_id=key.key_id, secret_hash=key.hashed())
    if as_json:
        print_json({"key_id": shown(key.key_id), "key": key.text(), "tenant_id": values["tenant_id"]})
    else:
        print_data(key.text())
        say("Save this key now: it is not shown again. Send it to the API as `Authorization: Bearer …`.")
    return Exit.DONE


def _connected() -> AbstractContextManager[Session]:
    from dispatcher.store.connections import connected

    return connected(load_settings("database_url").database_url, name="dispatcher keys")


def _values(options: dict[str, Any]) -> dict[str, Any]:
    """The new key's columns.

    Raises:
        UsageError: an option is invalid.
    """
    name, tenant_id = options["name"], options["tenant_id"]
    if options["all_tenants"] and click.get_current_context().get_parameter_source("tenant_id") is not _DEFAULT:
        raise click.UsageError("--all-tenants cannot be combined with --tenant.")
    if not 1 <= len(name) <= MAX_NAME_CHARACTERS or not name.isprintable():
        raise click.UsageError(f"--name must have 1 to {MAX_NAME_CHARACTERS} printable characters.")
    try:
        tenant(tenant_id)
    except InvalidEmail as error:
        raise click.UsageError(f"--tenant {error.reason}.") from None
    domains, addresses = _senders(options)
    return {
        "name": name,
        "tenant_id": None if options["all_tenants"] else tenant_id,
        "scopes": sorted(set(options["scopes"])),
        "sender_domains": domains,
        "sender_addresses": addresses,
        "requests_per_second": options["per_second"],
        "recipients_per_day": options["recipients_per_day"],
        "lane": known_lane(options["lane"], "--lane"),
        "allowed_lanes": sorted({str(known_lane(lane, "--allow-lane")) for lane in options["allowed_lanes"]}),
    }


def _senders(options: dict[str, Any]) -> tuple[list[str] | None, list[str] | None]:
    """The allowed sender domains and addresses, normalized for comparison; both None if any sender is allowed."""
    domains, addresses = options["domains"], options["addresses"]
    if options["from_anywhere"]:
        if domains or addresses:
            raise click.UsageError("--from-anywhere cannot be combined with --from-domain or --from-address.")
        return None, None
    if not (domains or addresses) and "send" in options["scopes"]:
        raise click.UsageError(
            "A key with the scope send needs --from-domain or --from-address, which limit its sender addresses. "
            "(--from-anywhere allows any sender address.)"
        )
    return [_comparable("domain", text) for text in domains], [_comparable("address", text) for text in addresses]


def _comparable(kind: str, text: str) -> str:
    from dispatcher.store.comparable_address import comparable_address

    before = "x@" if kind == "domain" else ""
    try:
        return comparable_address(before + text).removeprefix(before)
    except ValueError as error:
        raise click.UsageError(f"--from-{kind} {text!r} {error}.") from None


@command.command("list")
@click.option("--all", "with_revoked", is_flag=True, help="Include revoked keys.")
@json_option()
def list_(*, with_revoked: bool, as_json: bool) -> int:
    """List the keys: id, name, tenant, scopes, senders, lanes, limits. Secrets are never shown.

    \b
    Examples:
      dispatcher keys list
      dispatcher keys list --all --json | jq -r '.[].name'
    """
    from dispatcher.store.api_keys import list_keys

    with _connected() as connection:
        all_keys = list_keys.sync(connection)
    keys = [key for key in all_keys if with_revoked or key.revoked_at is None]
    if as_json:
        print_json([_document(key) for key in keys])
    elif keys:
        table = Table("key", "name", "tenant", "scopes", "senders", "lanes", "requests/s", "recipients/day", "created")
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
        "lane": key.lane,
        "allowed_lanes": sorted(key.allowed_lanes),
        "created_at": key.created_at,
        "revoked_at": key.revoked_at,
    }


def _row(key: Any) -> list[str]:
    senders = None if key.sender_domains is None else sorted({*key.sender_domains, *(key.sender_addresses or ())})
    created = f"{key.created_at:%Y-%m-%d %H:%M}" + (" (revoked)" if key.revoked_at else "")
    limits = ["-" if limit is None else f"{limit:g}" for limit in (key.requests_per_second, key.recipients_per_day)]
    tenant_id = "(all)" if key.tenant_id is None else key.tenant_id
    names = [shown(key.key_id), key.name, tenant_id, " ".join(sorted(key.scopes))]
    lanes = sorted(key.allowed_lanes - {key.lane})
    return [
        *(*names, "any" if senders is None else ", ".join(senders) or "-"),
        *(" ".join([key.lane, *lanes] if key.lane else lanes) or "-", *limits, created),
    ]


@command.command("revoke")
@click.argument("key_id")
@audit_options(is_required=False)
def revoke(key_id: str, act: Act | None) -> int:
    """Revoke a key by its id, which `keys list` shows. Running API processes refuse the key within seconds.

    \b
    Example:
      dispatcher keys revoke ed_k3v9q0xw2m7a --reason "the laptop was stolen"
    """
    from dispatcher.ops import api_keys

    decided = made_act(act, "dispatcher keys revoke")
    say(f"Revoked {run_with_session('keys', lambda session: api_keys.revoke(session, key_id, decided))}.")
    return Exit.DONE
