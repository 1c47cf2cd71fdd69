"""Collects the records of a storm from files, SQL and AMQP, without any code of the product."""

from __future__ import annotations

import re
from collections import Counter
from datetime import datetime
from uuid import UUID

import orjson
import psycopg

from dispatcher.dev.oracle import DlqEntry, Records, Row
from dispatcher.dev.wire import RecordedAttempt, Wire
from tests.acceptance.harness import Sink
from tests.acceptance.rabbit import QueueMessage
from tests.chaos.message_actions import DAMAGED_TENANT
from tests.chaos.producer import recipients_of
from tests.chaos.reporter import FORGED
from tests.chaos.stage import StormStage
from tests.supervisor.program import Event

_ROWS = """
    select email_id, message_key, status, lease_token, error_type, expires_at is not null
    from dispatcher.email_log
    where tenant_id <> %s
"""
_DAMAGED = "select email_id from dispatcher.email_log where tenant_id = %s"
_ATTEMPTS = """
    select email_id, attempt_number, worker, extract(epoch from started_at)::float8,
        extract(epoch from finished_at)::float8, outcome
    from dispatcher.every_attempt
    order by started_at
"""
_UNLEDGERED = """
    select email_id
    from dispatcher.email_log
    where status = 'held'
        and rescued_from = any(%s)
        and lease_token = rescued_token + 1
"""
"""Selects emails that recovery took from these workers and set to `held`, and that have not changed since."""
_SETTLED = """
    select distinct email_id
    from dispatcher.operator_audit
    where action = 'settle' and detail ->> 'to' = 'sent'
"""
_FORGED = "select email_id from dispatcher.email_event where kind = %s"
_REPORTED = "select distinct email_id from dispatcher.email_event"
_ID = re.compile(rb"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def collect(stage: StormStage, policy: str) -> Records:
    """The records that the oracle needs. Call this after the dispatcher has ended."""
    with psycopg.connect(stage.ground.database_url, autocommit=True) as session:
        rows = {row[0]: Row(*row[1:]) for row in session.execute(_ROWS, [DAMAGED_TENANT])}
        damaged = {row[0] for row in session.execute(_DAMAGED, [DAMAGED_TENANT])}
        attempts = [RecordedAttempt(*row) for row in session.execute(_ATTEMPTS) if row[0] not in damaged]
        unledgered = {row[0] for row in session.execute(_UNLEDGERED, [_died_without_ledger(stage)])}
        reported = {row[0] for row in session.execute(_REPORTED)}
        forged = sum(1 for _ in session.execute(_FORGED, [FORGED]))
        settled = {row[0] for row in session.execute(_SETTLED)}
    recovered = [event for event in stage.events("email.recovered") if UUID(event["email_id"]) not in damaged]
    about_damaged = {str(email_id).encode() for email_id in damaged}
    entries, unknown = _dlq_entries(stage, about_damaged)
    requested_keys = stage.producers.keys()
    recipients = {}
    if isinstance(stage.provider, Sink):  # it records for whom it accepts an email
        known = {i: row.message_key for i, row in rows.items() if row.message_key in requested_keys}
        recipients = {i: recipients_of(key, stage.plan.recipients) for i, key in known.items()}
    return Records(
        policy=policy,
        requested_keys=requested_keys,
        answers=stage.producers.answers(),
        rows=rows,
        attempts=attempts,
        expired_leases=Counter(UUID(event["email_id"]) for event in recovered),
        dlq_entries=entries,
        unknown_messages=unknown,
        garbage=frozenset(stage.diary.garbage),
        waiting=len(_messages(stage, stage.ground.topology.queue, about_damaged)),
        accepted=stage.provider.delivered(),
        recipients=recipients,
        deliveries=stage.provider.deliveries() if isinstance(stage.provider, Sink) else {},
        wire=Wire.of(stage.provider.witnessed()),
        disturbances=stage.diary.disturbances,
        faults=tuple(stage.diary.faults),
        unledgered=frozenset(unledgered),
        expired_at=[_unix(event) for event in recovered if event["reason"] == "lease_expired"],
        fault_times=tuple(stage.diary.struck_at),
        reported=frozenset(stage.reporter.reported | reported) if stage.reporter else None,
        settled=frozenset(settled),
        cancelling=frozenset(stage.diary.cancelling),
        cancelled_at=stage.diary.cancelled_at,
        too_late=frozenset(stage.diary.too_late),
        forgeries=forged + (stage.reporter.accepted_forgeries if stage.reporter else 0),
    )


def _died_without_ledger(stage: StormStage) -> list[str]:
    """Workers whose ledger was deleted and that did not drain. A worker that drains releases the emails that it has not
    sent."""
    drained = {event["pid"] for event in stage.events("process.exited") if event["exit_status"] == "exit 0"}
    return [worker for worker, pid in stage.diary.ledgerless.items() if pid not in drained]


def _unix(event: Event) -> float:
    return datetime.fromisoformat(event["timestamp"]).timestamp()


def _dlq_entries(stage: StormStage, about_damaged: set[bytes]) -> tuple[list[DlqEntry], list[bytes]]:
    entries, unknown = [], []
    for message in _messages(stage, stage.ground.topology.dlq, about_damaged):
        if message.was_rejected:
            unknown.append(message.body)
        else:
            document = orjson.loads(message.body)
            entries.append(DlqEntry(UUID(document["email_id"]), document["status"]))
    return entries, unknown


def _messages(stage: StormStage, queue: str, about_damaged: set[bytes]) -> list[QueueMessage]:
    """A queue's messages, except those that name a damaged row. The relay publishes such a row again and again."""
    return [
        message for message in stage.rabbit.read_all(queue) if not about_damaged.intersection(_ID.findall(message.body))
    ]
