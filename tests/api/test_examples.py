"""Every example in examples/ runs unchanged."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest

from dispatcher.dev import cache, debian
from dispatcher.errors import InvalidEmail
from tests.api.running_api import Api

ROOT = Path(__file__).parents[2]


@pytest.fixture
def orders(connection: psycopg.Connection) -> Iterator[psycopg.Connection]:
    connection.execute("create table orders (number integer primary key, customer text)")
    yield connection
    connection.execute("drop table orders")


def books(connection: psycopg.Connection) -> tuple[list[Any], list[Any]]:
    placed = [row[0] for row in connection.execute("select number from orders order by 1").fetchall()]
    return placed, [row[0] for row in connection.execute("select message_key from email_log order by 1").fetchall()]


def environment_with_curl() -> dict[str, str]:
    """An environment with curl in its PATH. If the system has no curl, Debian's package is downloaded once, without
    root."""
    if shutil.which("curl"):
        return {"PATH": os.environ["PATH"]}

    def fetch(folder: Path) -> None:
        debian.fetch("curl", folder, even_if_installed="curl", remedy="Install curl.", progress=print)

    root = cache.obtain(f"curl-{debian.system()}", fetch)
    libraries = ":".join(map(str, debian.library_folders(root)))
    return {"PATH": f"{root / 'usr/bin'}:{os.environ['PATH']}", "LD_LIBRARY_PATH": libraries}


async def test_curl(api: Api, connection: psycopg.Connection) -> None:
    def run() -> subprocess.CompletedProcess[str]:
        env = {**environment_with_curl(), "DISPATCHER_API_URL": api.url}
        return subprocess.run(
            ["sh", "examples/curl.sh"], cwd=ROOT, env=env, capture_output=True, text=True, check=False
        )

    for _ in range(2):
        ended = await asyncio.to_thread(run)
        assert ended.returncode == 0, ended.stderr

    keys = [row[0] for row in connection.execute("select message_key from email_log order by 1").fetchall()]
    assert keys == ["order-17-receipt", "order-18-receipt", "order-19-receipt"]


DJANGO = """
import sys
from urllib.parse import urlsplit
from django.conf import settings
url = urlsplit(sys.argv[1])
settings.configure(EMAIL_BACKEND="dispatcher.contrib.django.EmailBackend", DATABASES={"default": {
    "ENGINE": "django.db.backends.postgresql", "NAME": url.path[1:], "USER": url.username, "PASSWORD": url.password,
    "HOST": url.hostname, "PORT": url.port,
}})
import django
django.setup()
from examples.django_orders import place_order
from dispatcher.errors import InvalidEmail
place_order(17, "ann@example.org")
try:
    place_order(18, "nobody")
except InvalidEmail:
    pass
"""


def test_django(orders: psycopg.Connection, database_url: str) -> None:
    assert urlsplit(database_url).port
    subprocess.run([sys.executable, "-c", DJANGO, database_url], cwd=ROOT, check=True, timeout=60)

    assert books(orders) == ([17], ["order-17-receipt"])


def test_psycopg(orders: psycopg.Connection, database_url: str) -> None:
    from examples.psycopg_orders import place_order

    with psycopg.connect(database_url) as connection:
        place_order(connection, 17, "ann@example.org")
        with pytest.raises(InvalidEmail):
            place_order(connection, 18, "nobody")

    assert books(orders) == ([17], ["order-17-receipt"])


def test_sqlalchemy(orders: psycopg.Connection, database_url: str) -> None:
    from sqlalchemy import create_engine
    from sqlalchemy.orm import Session

    from examples.sqlalchemy_orders import place_order, place_order_without_session

    engine = create_engine(database_url.replace("postgresql://", "postgresql+psycopg://"))
    with Session(engine) as session, session.begin():
        place_order(session, 17, "ann@example.org")
    with pytest.raises(InvalidEmail), Session(engine) as session, session.begin():
        place_order(session, 18, "nobody")
    with engine.begin() as connection:
        place_order_without_session(connection, 19, "ann@example.org")
    with pytest.raises(InvalidEmail), engine.begin() as connection:
        place_order_without_session(connection, 20, "nobody")
    engine.dispose()

    assert books(orders) == ([17, 19], ["order-17-receipt", "order-19-receipt"])


async def test_sqlalchemy_with_asyncio(orders: psycopg.Connection, database_url: str) -> None:
    from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

    from examples.sqlalchemy_async_orders import place_order, place_order_without_session

    engine = create_async_engine(database_url.replace("postgresql://", "postgresql+psycopg://"))
    async with AsyncSession(engine) as session, session.begin():
        await place_order(session, 17, "ann@example.org")
    with pytest.raises(InvalidEmail):
        async with AsyncSession(engine) as session, session.begin():
            await place_order(session, 18, "nobody")
    async with engine.begin() as connection:
        await place_order_without_session(connection, 19, "ann@example.org")
    with pytest.raises(InvalidEmail):
        async with engine.begin() as connection:
            await place_order_without_session(connection, 20, "nobody")
    await engine.dispose()

    assert books(orders) == ([17, 19], ["order-17-receipt", "order-19-receipt"])


async def test_fastapi(orders: psycopg.Connection, database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from examples.fastapi_orders import Order, place_order

    monkeypatch.setenv("DATABASE_URL", database_url)
    await place_order(Order(number=17, customer="ann@example.org"))
    with pytest.raises(InvalidEmail):
        await place_order(Order(number=18, customer="nobody"))

    assert books(orders) == ([17], ["order-17-receipt"])
