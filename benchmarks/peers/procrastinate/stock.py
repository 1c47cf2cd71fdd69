"""procrastinate as in its documentation's quickstart: plain functions, which the worker runs in threads."""

from __future__ import annotations

import threading

import psycopg
from procrastinate import App, PsycopgConnector, RetryStrategy

from benchmarks.peers import application, sendgrid_stock

SETTINGS = application.settings()

app = App(connector=PsycopgConnector(conninfo=SETTINGS.database_url))

_local = threading.local()


def connect() -> psycopg.Connection:
    """Open this worker thread's own connection."""
    if not hasattr(_local, "connection"):
        _local.connection = psycopg.connect(SETTINGS.database_url)
    connection: psycopg.Connection = _local.connection
    return connection


@app.task(retry=RetryStrategy(wait=int(SETTINGS.lease_seconds), retry_exceptions={application.Busy}))
def send_email(email_id: str) -> None:
    """Load the email, lease it, send it, and record the outcome."""
    connection = connect()
    with connection.transaction():
        email = application.lease(connection, email_id, SETTINGS.lease_seconds)
    if email is None:
        return
    provider_message_id = sendgrid_stock.send(email, SETTINGS.sendgrid_host)
    with connection.transaction():
        values = application.recorded(email, provider_message_id)
        connection.execute(application.RECORD, values)
        connection.execute(application.COMPLETE, values)


def enqueue(connection: psycopg.Connection, draft: application.Draft) -> None:
    """Enqueue the email and its job in one transaction."""
    with connection.transaction():
        email_id = application.insert(connection, draft)
        if email_id is not None:
            send_email.configure(connection=connection).defer(email_id=str(email_id))
