"""dramatiq as in its documentation's user guide, with confirmed messages."""

from __future__ import annotations

import threading

import dramatiq
import psycopg
from dramatiq.brokers.rabbitmq import RabbitmqBroker
from dramatiq.errors import Retry

from benchmarks.peers import application, sendgrid_stock

SETTINGS = application.settings()

dramatiq.set_broker(RabbitmqBroker(url=SETTINGS.amqp_url, confirm_delivery=True))

_local = threading.local()


def connect() -> psycopg.Connection:
    """Open this worker thread's own connection."""
    if not hasattr(_local, "connection"):
        _local.connection = psycopg.connect(SETTINGS.database_url)
    connection: psycopg.Connection = _local.connection
    return connection


@dramatiq.actor(queue_name=SETTINGS.queue)
def send_email(email_id: str) -> None:
    """Load the email, lease it, send it, and record the outcome."""
    connection = connect()
    try:
        with connection.transaction():
            email = application.lease(connection, email_id, SETTINGS.lease_seconds)
    except application.Busy as busy:
        raise Retry(delay=int(1000 * busy.seconds)) from busy
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
        send_email.send(str(email_id))
