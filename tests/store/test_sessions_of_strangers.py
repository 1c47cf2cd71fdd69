"""A session counts as one of our processes only if its role has our rights, because any session can have any name."""

from __future__ import annotations

import asyncio

import psycopg

from dispatcher.store.alerts import list_shared_host_names
from dispatcher.store.connections import connect_async
from dispatcher.store.emails import find_facts
from dispatcher.store.figures import list_workers
from dispatcher.store.settlement import terminate_sessions
from tests.store.books import Books, UrlOf
from tests.waiting import until

WORKER = "host-a:w0:4711:9f86d081"


async def test_the_sessions_of_a_dead_worker_are_terminated_and_those_of_strangers_do_not_delay_recovery(
    url_of: UrlOf, books: Books
) -> None:
    ours = url_of("dispatcher")
    worker = psycopg.connect(ours, autocommit=True, application_name=WORKER)
    with psycopg.connect(url_of("stranger"), autocommit=True, application_name=WORKER) as stranger:
        async with await connect_async(ours, name="relay") as relay:
            assert await terminate_sessions(relay, WORKER) == 1
            await until(lambda: len(books.sessions(WORKER)) == 1)
            assert await terminate_sessions(relay, WORKER) == 0
        assert stranger.execute("select 1").fetchone() == (1,)
    worker.close()


async def test_the_sessions_of_strangers_are_neither_workers_nor_hosts(
    tables_url: str, url_of: UrlOf, books: Books
) -> None:
    email_id = books.enqueue_one()
    url = url_of("stranger")
    with (
        psycopg.connect(url, application_name=WORKER),
        psycopg.connect(url, application_name="dispatcher alerts twin"),
        psycopg.connect(url, application_name="dispatcher alerts twin"),
        psycopg.connect(tables_url) as connection,
    ):
        async with await connect_async(tables_url, name="operator") as session:
            facts = await find_facts(session, email_id)
        assert facts is not None
        assert facts.workers == 0
        assert await asyncio.to_thread(list_workers.sync, connection) == []
        assert await asyncio.to_thread(list_shared_host_names.sync, connection) == []
