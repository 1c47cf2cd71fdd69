"""Celery, tuned: persistent connections, combined statements, no second round trip for a commit, little logging.

`--sweep` varies the pool, the concurrency and the prefetch multiplier.
"""

from __future__ import annotations

import functools
import os

import psycopg
from celery import Celery, Task
from psycopg_pool import ConnectionPool

from benchmarks.peers import application
from benchmarks.peers.sendgrid_pooled import SendGrid

SETTINGS = application.settings()
THREADS = int(os.environ["PEER_THREADS"])
"""Concurrent tasks in one process."""

app = Celery("shop", broker=SETTINGS.amqp_url)
app.conf.update(
    task_default_queue=SETTINGS.queue,
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    task_ignore_result=True,
    task_store_errors_even_if_ignored=False,
    worker_prefetch_multiplier=int(os.environ["PEER_PREFETCH_MULTIPLIER"]),
    worker_send_task_events=False,
    worker_enable_remote_control=False,
    broker_transport_options={"confirm_publish": True},
)


@functools.cache
def pool() -> ConnectionPool:
    """The connection pool, opened by the first task, after the fork."""
    return ConnectionPool(SETTINGS.database_url, min_size=1, max_size=THREADS, kwargs={"autocommit": True})


@functools.cache
def sendgrid() -> SendGrid:
    """The client, created by the first task, after the fork."""
    return SendGrid(SETTINGS, THREADS)


@app.task(bind=True, max_retries=None)
def send_email(self: Task, email_id: str) -> None:
    """Lease the email and read its content in one statement, send it, and record the outcome."""
    try:
        with pool().connection() as connection:
            email = application.lease(connection, email_id, SETTINGS.lease_seconds)
    except application.Busy as busy:
        raise self.retry(countdown=busy.seconds) from busy
    if email is None:
        return
    provider_message_id = sendgrid().send(email)
    with pool().connection() as connection:
        application.record(connection, email, provider_message_id)


def enqueue(connection: psycopg.Connection, draft: application.Draft) -> None:
    """Commit the application's transaction, then publish the message; the two are not atomic."""
    with connection.transaction():
        email_id = application.insert(connection, draft)
    if email_id is not None:
        send_email.delay(str(email_id))
