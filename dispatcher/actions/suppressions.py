"""List, add, remove, import and export the recipients who get no email.

A hard bounce, a complaint or an unsubscribe suppresses the recipient automatically (see DISPATCHER_SUPPRESS_ON).
The database does not store the addresses of suppressed recipients, only keyed hashes and masked forms such as
`a•••@example.org`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar, Final

from dispatcher.actions.action import Change, Listing, Paged, Reach, field
from dispatcher.domain.kinds import INSTANT, PRINTABLE, SINCE, TENANT, Kind, many, one_of, text, whole
from dispatcher.domain.suppression import (
    RECIPIENT_PATTERN,
    AddedSuppressions,
    Recipient,
    RemovedSuppressions,
    Suppression,
    SuppressionReason,
)
from dispatcher.domain.text import MAX_TOPIC_CHARACTERS, TOPIC_PATTERN

MAX_RECIPIENTS: Final = 1000
MAX_STOPPED: Final = 1000
"""The most ids of stopped emails in a response. `POST /v1/replays` accepts the same number of ids."""
MAX_DAYS: Final = 36_500
MAX_NOTE_CHARACTERS: Final = 500


def _recipient(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError
    return Recipient.parse(value).text


def _lines(text: str) -> list[str]:
    return [each for each in re.split(r"[\n,]", text) if each.strip()]


RECIPIENT: Final = Kind(
    "must be an address or a domain",
    {"type": "string", "minLength": 3, "pattern": RECIPIENT_PATTERN},
    _recipient,
    metavar="ADDRESS|DOMAIN",
)
"""An address, a phone number or a domain. A value must not be logged, or be in a URL."""
_MANY: Final = many(RECIPIENT, MAX_RECIPIENTS, "addresses or domains")
RECIPIENTS: Final = Kind(_MANY.rule, _MANY.schema, _MANY.read, _lines, RECIPIENT.metavar)
"""Recipients. In a text, each has a line, or commas separate them, because a display name may contain spaces."""
KIND: Final = one_of(SuppressionReason)
_NOTE: Final = text(
    MAX_NOTE_CHARACTERS, PRINTABLE, f"must be at most {MAX_NOTE_CHARACTERS} printable characters", least=0
)
TOPIC: Final = text(
    MAX_TOPIC_CHARACTERS, f"^{TOPIC_PATTERN}$", "must be the name of a topic, such as newsletter", "TOPIC"
)
_OWN: Final = (
    "The tenant; by default the tenant of the key, or `default`. Each tenant has its own suppressed recipients."
)
_ONLY: Final = "Only this tenant's entries."


class ListSuppressions(
    Paged[Suppression],
    name="suppressions list",
    http="GET /v1/suppressions",
    query="list_suppressions",
    reach=Reach.ANY_TENANT,
):
    """List suppressed recipients of all tenants or of one, newest first. Addresses are masked. Entries that have ended
    are listed, too."""

    key: ClassVar = {"created_at": datetime, "id": int}
    stops = "recipient"
    constants: ClassVar = {"examined": 20_000}
    tenant_id: str | None = field(TENANT, _ONLY, default=None)
    kind: SuppressionReason | None = field(KIND, "Only entries of this kind.", default=None)
    topic: str | None = field(TOPIC, "Only entries for this topic.", default=None)
    since: datetime | None = field(SINCE, "Only entries made since this time.", default=None)
    limit: int = field(whole(1, 1000), "The most entries per page.", default=50)

    nothing = "No such recipient is suppressed."
    missing: ClassVar = {"topic": "all", "expires_at": "for ever"}
    examples = ("suppressions list --kind complaint", "suppressions list --tenant shop --since 3d")

    async def none_found(self, source: Any) -> str:
        """Names the tenant, and the tenants that have entries."""
        from dispatcher.store.suppressions import list_suppressing_tenants

        if self.tenant_id is None:
            return self.nothing
        others = ", ".join(await list_suppressing_tenants(source)) or "none"
        return f"Tenant {self.tenant_id!r} suppresses no such recipient. Tenants with entries: {others}."


class LookUp(Listing[Suppression], name="suppressions look-up", reach=Reach.ANY_TENANT):
    """The entries that suppress a recipient, for all emails or for a topic: its own; for an address, also its domain's.

    Has no HTTP operation, because an address must not be in a URL.
    """

    recipient: str = field(RECIPIENT, "An address or a domain.")
    tenant_id: str | None = field(TENANT, _ONLY, default=None)

    arguments = ("recipient",)
    nothing = ListSuppressions.nothing
    missing: ClassVar = ListSuppressions.missing

    async def run(self, source: Any, parameters: Mapping[str, Any]) -> Sequence[Suppression]:
        from dispatcher.ops.suppressions import hashes_of
        from dispatcher.store.statements import fetch

        hashes = await hashes_of(source, [self.recipient], with_domains=True)
        return await fetch(source, "find_suppressions", {**parameters, "address_hashes": hashes}, into=Suppression)


class AddSuppressions(
    Change[AddedSuppressions],
    name="suppressions add",
    http="POST /v1/suppressions",
    query="insert_suppressions",
    reach=Reach.ONE_TENANT,
):
    """Suppress addresses and domains. A domain does not include its subdomains.

    A new entry replaces an existing entry that ends earlier. An existing entry that lasts at least as long as the new
    entry is not changed. Workers apply a new entry within two seconds. From then on, the tenant sends nothing to these
    recipients, and an email that has no other recipient fails with the error `suppressed`.
    """

    recipients: tuple[str, ...] = field(RECIPIENTS, "Addresses, and domains such as example.org.")
    tenant_id: str | None = field(TENANT, _OWN, default=None)
    kind: SuppressionReason = field(KIND, "Why the recipients get no email.", default=SuppressionReason.MANUAL)
    topic: str | None = field(TOPIC, "Only emails with this topic are stopped.  [default: all emails]", default=None)
    days: int | None = field(whole(1, MAX_DAYS), "The entry ends after N days.  [default: never]", default=None)
    expires_at: datetime | None = field(INSTANT, "The entry ends at this time.  [default: never]", default=None)
    note: str | None = field(_NOTE, "A note for operators, without addresses.", default=None)

    arguments = ("recipients",)
    not_both = ("days", "expires_at")
    tells_row = True
    done = "All hosts apply the change within two seconds."
    examples = (
        'suppressions add ann@example.org --reason "closed account"',
        'suppressions add example.net --days 30 --reason "their server is broken"',
    )

    async def prepare(self, source: Any, settings: Any) -> Mapping[str, Any]:
        from dispatcher.domain.scrub import scrub
        from dispatcher.store.address_hashes import AddressHasher
        from dispatcher.store.suppressions import Entry, parameters_of

        del settings
        hasher = await AddressHasher.open(source)
        note = scrub(self.note) or None if self.note else None
        ends = datetime.now(UTC) + timedelta(days=self.days) if self.days else self.expires_at
        return parameters_of(
            [Entry.of(Recipient.parse(each), hasher, self.kind, note, ends, self.topic) for each in self.recipients]
        )


class RemoveSuppressions(
    Change[RemovedSuppressions], name="suppressions remove", http="DELETE /v1/suppressions", reach=Reach.ONE_TENANT
):
    """Let recipients get emails again. The tenant's next emails go to them. Name them, or give their entries' ids.

    Recipients that you name without a topic lose only their entries for all emails: what they left stays left.

    Emails that failed because all their recipients were suppressed stay failed, until you replay them. Their ids are
    `stopped_email_ids`, oldest first: `POST /v1/replays` with these ids sends each of them once.
    """

    recipients: tuple[str, ...] | None = field(RECIPIENTS, "Addresses, and domains such as example.org.", default=None)
    ids: tuple[int, ...] | None = field(
        many(whole(1, 2**63 - 1), MAX_RECIPIENTS, "ids of entries"),
        "Entries by their ids, as `suppressions list` shows them.",
        default=None,
        option="--id",
    )
    topic: str | None = field(
        TOPIC, "The topic of the entries of `recipients`.  [default: the entries for all emails]", default=None
    )
    tenant_id: str | None = field(TENANT, _OWN, default=None)

    arguments = ("recipients",)
    one_of = ("recipients", "ids")
    done = "The next emails of the tenant go to the recipients again."
    examples = ('suppressions remove ann@example.org --reason "mailbox works again"',)

    async def run(self, source: Any, parameters: Mapping[str, Any]) -> Sequence[RemovedSuppressions]:
        from dispatcher.ops.suppressions import find_stopped, hashes_of
        from dispatcher.store.suppressions import delete_suppressions

        hashes = await hashes_of(source, self.recipients or (), topic=self.topic)
        why = {name: parameters[name] for name in ("tenant_id", "actor", "reason")}
        removed = await delete_suppressions(source, address_hashes=hashes, ids=self.ids or (), **why)
        stopped = await find_stopped(source, parameters["tenant_id"], [*hashes, *removed])
        return [RemovedSuppressions(len(removed), len(stopped), stopped[:MAX_STOPPED])]


ACTIONS = (ListSuppressions, AddSuppressions, RemoveSuppressions)
