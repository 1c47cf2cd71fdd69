"""dramatiq, tuned: persistent connections, combined statements, no second round trip per commit, less middleware."""

from __future__ import annotations

import functools
import os

import dramatiq
import psycopg
from dramatiq.brokers.rabbitmq import RabbitmqBroker
from dramatiq.errors import Retry
from dramatiq.middleware import Retries, ShutdownNotifications
from psycopg_pool import ConnectionPool

from benchmarks.peers import application
from benchmarks.peers.sendgrid_pooled import SendGrid

SETTINGS = application.settings()
THREADS = int(os.environ["PEER_THREADS"])
"""Concurrent actors in one process."""

dramatiq.set_broker(
    RabbitmqBroker(url=SETTINGS.amqp_url, confirm_delivery=True, middleware=[ShutdownNotifications(), Retries()])
)


@functools.cache
def pool() -> ConnectionPool:
    """The connection pool, opened by the first message, after the fork."""
    return ConnectionPool(SETTINGS.database_url, min_size=1, max_size=THREADS, kwargs={"autocommit": True})


@functools.cache
def sendgrid() -> SendGrid:
    """The client, created by the first message, after the fork."""
    return SendGrid(SETTINGS, THREADS)


@dramatiq.actor(queue_name=SETTINGS.queue)
def send_email(email_id: str) -> None:
    """Lease the email and read its content in one statement, send it, and record the outcome."""
    try:
        with pool().connection() as connection:
            email = application.lease(connection, email_id, SETTINGS.lease_seconds)
    except application.Busy as busy:
        raise Retry(delay=int(1000 * busy.seconds)) from busy
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
        send_email.send(str(email_id))
