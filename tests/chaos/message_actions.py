"""The adversary's actions on the messages of the send queue."""

from __future__ import annotations

from contextlib import suppress
from random import Random
from uuid import uuid4

import orjson
import pika

from dispatcher.config import MAX_BUNDLE_EMAILS
from tests.acceptance.outages import RABBITMQ
from tests.chaos.action import BROKEN, rows_of
from tests.chaos.stage import StormStage


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


def _takes_messages(stage: StormStage) -> bool:
    return not stage.outages.is_away(RABBITMQ) and not stage.outages.is_alarmed


def _pointer(email_id: str, message_key: str) -> bytes:
    return orjson.dumps({"v": 1, "email_id": email_id, "message_key": message_key})


def _bundle(emails: object) -> bytes:
    return orjson.dumps({"v": 2, "emails": emails})
