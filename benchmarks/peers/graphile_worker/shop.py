"""The application's enqueueing: one transaction for the email, its key and its job."""

from __future__ import annotations

import psycopg

from benchmarks.peers import application

ADD_JOB = "select graphile_worker.add_job('send_email', json_build_object('email_id', %s::text))"


def enqueue(connection: psycopg.Connection, draft: application.Draft) -> None:
    """Enqueue the email and its job in one transaction."""
    with connection.transaction():
        email_id = application.insert(connection, draft)
        if email_id is not None:
            connection.execute(ADD_JOB, [str(email_id)])
