"""procrastinate, tuned: coroutines, a pooled HTTP session, combined statements, finished jobs deleted, uvloop."""

from __future__ import annotations

import os
import ssl

import aiohttp
import psycopg
import uvloop
from procrastinate import App, PsycopgConnector, RetryStrategy
from psycopg_pool import AsyncConnectionPool

from benchmarks.peers import application

uvloop.install()

SETTINGS = application.settings()
CONCURRENCY = int(os.environ["PEER_THREADS"])
"""Concurrent jobs in one process."""

app = App(connector=PsycopgConnector(conninfo=SETTINGS.database_url, min_size=2, max_size=CONCURRENCY))

_opened: list[tuple[AsyncConnectionPool, aiohttp.ClientSession]] = []


async def opened() -> tuple[AsyncConnectionPool, aiohttp.ClientSession]:
    """The pools, opened by the first job on the worker's loop."""
    if not _opened:
        pool = AsyncConnectionPool(
            SETTINGS.database_url, min_size=2, max_size=CONCURRENCY, open=False, kwargs={"autocommit": True}
        )
        tls = ssl.create_default_context(cafile=SETTINGS.ca_file)
        session = aiohttp.ClientSession(
            headers={"Authorization": "Bearer SG.benchmark"},
            connector=aiohttp.TCPConnector(limit=CONCURRENCY, ssl=tls),
            timeout=aiohttp.ClientTimeout(total=20),
        )
        _opened.append((pool, session))
        await pool.open()
    return _opened[0]


@app.task(retry=RetryStrategy(wait=int(SETTINGS.lease_seconds), retry_exceptions={application.Busy}))
async def send_email(email_id: str) -> None:
    """Lease the email and read its content in one statement, send it, and record the outcome."""
    pool, session = await opened()
    async with pool.connection() as connection:
        email = await lease(connection, email_id)
    if email is None:
        return
    async with session.post(f"{SETTINGS.sendgrid_host}/v3/mail/send", json=email.as_sendgrid()) as response:
        response.raise_for_status()
        provider_message_id = response.headers["X-Message-Id"]
    async with pool.connection() as connection:
        await connection.execute(application.RECORD_AND_COMPLETE, application.recorded(email, provider_message_id))


async def lease(connection: psycopg.AsyncConnection, email_id: str) -> application.Email | None:
    """As `application.lease`."""
    values = {"email_id": email_id, "seconds": SETTINGS.lease_seconds}
    row = await (await connection.execute(application.LEASE, values)).fetchone()
    if row is not None:
        return application.Email(*row)
    looked = await (await connection.execute(application.LOOK, values)).fetchone()
    if looked is None or looked[0] == "sent":
        return None
    raise application.Busy(looked[1])


def enqueue(connection: psycopg.Connection, draft: application.Draft) -> None:
    """Enqueue the email and its job in one transaction."""
    with connection.transaction():
        email_id = application.insert(connection, draft)
        if email_id is not None:
            send_email.configure(connection=connection).defer(email_id=str(email_id))
