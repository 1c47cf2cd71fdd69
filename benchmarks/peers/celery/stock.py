"""Celery as in its documentation's first pages, but safe: late acknowledgements, confirmed and persistent messages."""

from __future__ import annotations

import psycopg
from celery import Celery, Task
from celery.signals import worker_process_init

from benchmarks.peers import application, sendgrid_stock

SETTINGS = application.settings()

app = Celery("shop", broker=SETTINGS.amqp_url)
app.conf.update(
    task_default_queue=SETTINGS.queue,
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    broker_transport_options={"confirm_publish": True},
)

_connections: list[psycopg.Connection] = []


@worker_process_init.connect
def connect(**_: object) -> None:
    """Open this worker process's own connection."""
    _connections.append(psycopg.connect(SETTINGS.database_url))


@app.task(bind=True, max_retries=None)
def send_email(self: Task, email_id: str) -> None:
    """Load the email, lease it, send it, and record the outcome."""
    (connection,) = _connections
    try:
        with connection.transaction():
            email = application.lease(connection, email_id, SETTINGS.lease_seconds)
    except application.Busy as busy:
        raise self.retry(countdown=busy.seconds) from busy
    if email is None:
        return
    provider_message_id = sendgrid_stock.send(email, SETTINGS.sendgrid_host)
    with connection.transaction():
        values = application.recorded(email, provider_message_id)
        connection.execute(application.RECORD, values)
        connection.execute(application.COMPLETE, values)


def enqueue(connection: psycopg.Connection, draft: application.Draft) -> None:
    """Commit the application's transaction, then publish the message; the two are not atomic."""
    with connection.transaction():
        email_id = application.insert(connection, draft)
    if email_id is not None:
        send_email.delay(str(email_id))
