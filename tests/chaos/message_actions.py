"""The adversary's actions on the messages of the send queue, and on the rows of the database."""

from __future__ import annotations

from contextlib import suppress
from random import Random
from typing import Final
from uuid import uuid4

import orjson
import pika
import psycopg

from dispatcher.config import MAX_BUNDLE_EMAILS
from dispatcher.domain.email_id import new_email_ids
from tests.acceptance.outages import POSTGRES, RABBITMQ
from tests.chaos.stage import BROKEN, StormStage, rows_of
from tests.store.damage import allow_damage
from tests.store.damaged_rows import DAMAGED, insert_row

MOST: Final = 6
DAMAGED_TENANT: Final = "damaged"
"""The tenant of the damaged rows. The oracle judges all other emails."""


def purge_queue(stage: StormStage, random: Random) -> bool:
    """Purge the ready messages. No email may be lost, because PostgreSQL has every email."""
    if stage.outages.is_away(RABBITMQ):
        return False
    with suppress(*BROKEN):
        stage.rabbit.purge(stage.ground.topology.queue)
        return True
    return False


def inject_duplicates(stage: StormStage, random: Random) -> bool:
    """Publish up to five copies of the messages of some existing and some cancelled emails. Then publish all of these
    emails as one bundle, some twice. Then publish the bundle again with an id that does not exist: this message ends on
    the DLQ, but the emails of the bundle get no dead letter."""
    statement = "select email_id, message_key from dispatcher.email_log where {} order by email_id desc limit {}"
    rows = rows_of(stage, statement.format("true", 400))
    if not rows or not _takes_messages(stage):
        return False
    cancelled = rows_of(stage, statement.format("status = 'cancelled'", 10))
    chosen = list({*random.sample(rows, min(len(rows), 30)), *cancelled})
    bodies = [_pointer(str(i), key) for i, key in chosen for _ in range(random.randint(1, 5))]
    pointers = [{"email_id": str(i), "message_key": key} for i, key in chosen]
    missing = {"email_id": str(uuid4()), "message_key": "nobody"}
    mixed = _bundle([*pointers[:15], missing, *pointers[15:]])
    stage.diary.garbage.add(mixed)
    bodies += [_bundle(random.choices(pointers, k=MAX_BUNDLE_EMAILS)), mixed]
    with suppress(*BROKEN):
        stage.rabbit.publish(stage.ground.topology.queue, *bodies)
        return True
    return False


def inject_garbage(stage: StormStage, random: Random) -> bool:
    if not _takes_messages(stage):
        return False
    missing = str(uuid4())
    bodies = (
        b"", b"\xff\x00", b"[]", b"{}", b"x" * 70_000, b"[" * 20_000, b'{"v":2}',
        _pointer(missing, "nobody"), _pointer("no-uuid", "nobody"), _pointer(missing, "a\0b"), _pointer(missing, ""),
        _bundle([]), _bundle([{}]), _bundle([[]]), _bundle("emails"), _bundle([{"v": 2, "emails": []}]),
        _bundle([{"email_id": missing, "message_key": "nobody"}] * (MAX_BUNDLE_EMAILS + 1)),
        _bundle([{"email_id": missing, "message_key": "nobody"}] * MAX_BUNDLE_EMAILS),
    )  # fmt: skip
    # Record the bodies before publishing them, because this process may be killed before it receives RabbitMQ's
    # confirms.
    stage.diary.garbage.update(bodies)
    properties = random.choice([None, pika.BasicProperties(headers={"traceparent": 3, "x": {"y": [1]}})])
    with suppress(*BROKEN):
        stage.rabbit.publish(stage.ground.topology.queue, *bodies, properties=properties)
        return True
    return False


def damage_rows(stage: StormStage, random: Random) -> bool:
    """Insert some rows with values that Python or AMQP cannot represent, as before the schema refused them."""
    # A card of another kind publishes messages with the keys that it finds.
    chosen = random.sample([row for name, row in DAMAGED.items() if not name.startswith("message_key")], MOST)
    if stage.outages.is_away(POSTGRES):
        return False
    with suppress(*BROKEN), psycopg.connect(stage.ground.database_url, connect_timeout=2) as session:
        session.execute("set local lock_timeout = '2s'")
        session.execute("set local search_path = dispatcher")
        with allow_damage(session):
            for email_id, columns in zip(new_email_ids(MOST), chosen, strict=True):
                row = {"email_id": email_id, "tenant_id": DAMAGED_TENANT, "message_key": str(email_id)}
                insert_row(session, {**row, "publish_due_at": "now", **columns})
        return True
    return False


def _takes_messages(stage: StormStage) -> bool:
    return not stage.outages.is_away(RABBITMQ) and not stage.outages.is_alarmed


def _pointer(email_id: str, message_key: str) -> bytes:
    return orjson.dumps({"v": 1, "email_id": email_id, "message_key": message_key})


def _bundle(emails: object) -> bytes:
    return orjson.dumps({"v": 2, "emails": emails})
