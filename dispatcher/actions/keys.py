"""Create, list and revoke the HTTP API's keys.

Every request needs a key, and `dispatcher api` does not start without one. The exception is for development: with
DISPATCHER_API_ALLOW_ANONYMOUS=on, requests on the loopback interface need no key until the first key is created.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Final

from dispatcher.actions.action import Action, Change, Listing, Mistake, Mistakes, Refusal, field
from dispatcher.domain.api_key import Key, NewKey, Scope, Secret
from dispatcher.domain.kinds import FILTER_TEXT, FLAG, TENANT, Kind, many, number, one_of, text, whole
from dispatcher.domain.text import DEFAULT_TENANT

_MOST: Final = 100
_ID: Final = re.compile(r"ed_[a-z0-9]{12}")


def _key_id(value: object) -> str:
    """The id, also if the whole key is given."""
    found = _ID.match(value) if isinstance(value, str) else None
    if found is None:
        raise ValueError
    return found[0]


def _sender(value: object) -> str:
    from dispatcher.store.comparable_address import comparable_address

    if not isinstance(value, str):
        raise TypeError
    return comparable_address(value)


def _sender_domain(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError
    return _sender(f"x@{value}").removeprefix("x@")


_SHORT: Final = {"type": "string", "minLength": 1, "maxLength": 320}
KEY_ID: Final = Kind("must be the id of a key, such as ed_k3v9q0xw2m7a", _SHORT, _key_id, metavar="KEY_ID")
_ADDRESS: Final = Kind("must be an email address", _SHORT, _sender, metavar="ADDRESS")
_DOMAIN: Final = Kind("must be a domain", _SHORT, _sender_domain, metavar="DOMAIN")


def _several(item: Kind[str], items: str) -> Kind[tuple[str, ...]]:
    """A list in which a space does not separate items, but is a mistake in one."""
    return replace(many(item, _MOST, items), parse=lambda text: text.split(","))


class ListKeys(Listing[Key], name="keys list", query="list_shown_keys"):
    """List the keys: id, name, tenant, scopes, senders, lanes, limits. Secrets are never shown."""

    with_revoked: bool = field(FLAG, "Include revoked keys.", default=False, option="--all")

    nothing = (
        "No key is valid, so `dispatcher api` does not start, and refuses every request if it runs. (With "
        "DISPATCHER_API_ALLOW_ANONYMOUS=on, and until the first key is created, it listens on the loopback interface "
        "only, and allows every request.) To create a key, see `dispatcher keys create --help`. `dispatcher keys list "
        "--all` lists the revoked keys."
    )
    constants: ClassVar = {"key_id": None}
    missing: ClassVar = {"tenant_id": "all tenants", "from_domains": "any", "from_addresses": "any"}
    examples = ("keys list", "keys list --all --json | jq -r '.keys[].name'")


class ShowKey(Action[Key], name="keys show", query="list_shown_keys"):
    """Show one key."""

    key_id: str = field(KEY_ID, "The key's id, which `keys list` shows.")

    arguments = ("key_id",)
    constants: ClassVar = {"with_revoked": True}
    refusals = (Refusal("no-key", "not-found", "There is no key {key_id}.", "See `dispatcher keys list --all`."),)
    missing = ListKeys.missing
    examples = ("keys show ed_k3v9q0xw2m7a",)


class CreateKey(Change[NewKey], name="keys create", query="insert_key"):
    """Create a key and print it. It is never shown again: only its hash is stored.

    The scope send needs --from-domain, --from-address or --from-anywhere.
    """

    # Only a command: otherwise, an attacker with a stolen session or key could create a key of any tenant and scope,
    # and use it after the theft was noticed.

    key_name: str = field(
        text(100, metavar="NAME"),
        "The application or operator that uses the key. `keys list` shows this name.",
        option="--name",
    )
    tenant_id: str | None = field(
        TENANT, "The tenant whose emails the key sends and reads.  [default: default]", default=None
    )
    all_tenants: bool = field(
        FLAG,
        "The key acts for every tenant. In the HTTP API, each request with such a key must contain a tenant_id. An "
        "operator who signs in to the page at /ops with such a key sees all tenants.",
        default=False,
    )
    scopes: tuple[Scope, ...] = field(
        many(one_of(Scope), len(Scope), "scopes"),
        "An action that the key allows. send: enqueue emails. read: read the status of emails. operate: cancel, "
        "replay, confirm or release emails, and suppress recipients. ignore_suppression: with the scope send, enqueue "
        "emails that are sent to suppressed recipients, too. content: with the scope read, also read the sender, the "
        "recipients and the subject of emails.  [default: send, read]",
        default=(Scope.SEND, Scope.READ),
        option="--scope",
    )
    from_domains: tuple[str, ...] = field(
        _several(_DOMAIN, "domains"), "Allow sender addresses of this domain.", default=(), option="--from-domain"
    )
    from_addresses: tuple[str, ...] = field(
        _several(_ADDRESS, "addresses"), "Allow this sender address.", default=(), option="--from-address"
    )
    from_anywhere: bool = field(FLAG, "Allow any sender address.", default=False)
    per_second: float | None = field(
        number(0.1, 1_000_000),
        "Allow at most N requests per second in each API process; each email of a batch counts as one request.  "
        "[default: no limit]",
        default=None,
    )
    recipients_per_day: int | None = field(
        whole(1, 2_000_000_000),
        "Allow at most N recipients per UTC day, in all API processes together.  [default: no limit]",
        default=None,
    )
    lane: str | None = field(
        FILTER_TEXT,
        "The lane of emails that do not name a lane.  [default: the sender's lane (see `lanes set`), or normal]",
        default=None,
    )
    allowed_lanes: tuple[str, ...] = field(
        _several(FILTER_TEXT, "lanes"),
        "Allow emails to name this lane, in addition to the lane of --lane.",
        default=(),
        option="--allow-lane",
    )

    is_test: bool = field(
        FLAG,
        "What the key enqueues is stored, and never leaves: workers simulate the outcome. Give the key a tenant of its "
        "own, because a test uses up its message keys. Not with the scope operate.",
        default=False,
        option="--test",
    )

    needs_reason = False
    secret = "key"  # noqa: S105 - a field's name
    done = "Save this key now: it is not shown again. Over HTTP: `Authorization: Bearer …`; over SMTP: the password."
    examples = (
        "keys create --name shop --from-domain example.com",
        "keys create --name login --from-address otp@example.com --lane urgent",
        "keys create --name ci --tenant shop-test --from-anywhere --test",
        "keys create --name dashboard --scope read",
        "keys create --name ann --all-tenants --scope operate",
        "keys create --name shop --from-address no-reply@example.com --per-second 50 --recipients-per-day 10000",
    )

    def check(self, settings: Any) -> None:
        """Whether the fields fit each other and DISPATCHER_LANES."""
        found = []
        if self.all_tenants and self.tenant_id is not None:
            found.append(Mistake("all_tenants", "cannot be combined with --tenant"))
        if self.from_anywhere and (self.from_domains or self.from_addresses):
            found.append(Mistake("from_anywhere", "cannot be combined with --from-domain or --from-address"))
        elif Scope.SEND in self.scopes and not (self.from_anywhere or self.from_domains or self.from_addresses):
            rule = "allows no sender: the scope send needs --from-domain, --from-address or --from-anywhere"
            found.append(Mistake("", rule))
        if self.is_test and Scope.OPERATE in self.scopes:
            rule = "cannot be combined with the scope operate, which sends real emails again"
            found.append(Mistake("is_test", rule))
        for name, lanes in (("lane", [self.lane] if self.lane else []), ("allowed_lanes", self.allowed_lanes)):
            if set(lanes) - set(settings.lanes):
                found.append(Mistake(name, f"must be one of DISPATCHER_LANES: {', '.join(settings.lanes)}"))
        if found:
            raise Mistakes(found)

    async def run(self, source: Any, parameters: Mapping[str, Any]) -> Sequence[NewKey]:
        """Inserts the hash of a new key, and returns the key."""
        key = Secret.new()
        values = {
            **parameters,
            "key_id": key.key_id,
            "secret_hash": key.hashed(),
            "tenant_id": None if self.all_tenants else self.tenant_id or DEFAULT_TENANT,
            "scopes": sorted(set(self.scopes)),
            "from_domains": None if self.from_anywhere else list(self.from_domains),
            "from_addresses": None if self.from_anywhere else list(self.from_addresses),
            "allowed_lanes": sorted(set(self.allowed_lanes)),
        }
        return [replace(row, key=key.text()) for row in await super().run(source, values)]


class RevokeKey(Change[Key], name="keys revoke", query="revoke_key"):
    """Revoke a key by its id, which `keys list` shows. Running API processes refuse the key within seconds."""

    key_id: str = field(KEY_ID, "The key's id, which `keys list` shows.")

    arguments = ("key_id",)
    needs_reason = False
    refusals = (Refusal("no-key", "not-found", "There is no active key {key_id}.", "See `dispatcher keys list`."),)
    done = "The key is revoked."
    examples = ('keys revoke ed_k3v9q0xw2m7a --reason "the laptop was stolen"',)


ACTIONS = (ListKeys, ShowKey, CreateKey, RevokeKey)
