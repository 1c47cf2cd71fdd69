"""Fixtures for tests of adapters: the workers' event loop, and a certificate authority."""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

import pytest
import trustme
import uvloop

from dispatcher.config import BUILT_IN
from dispatcher.domain.scrub import OWN_SECRETS


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Runs the tests in the workers' event loop."""
    return {"uvloop": uvloop.new_event_loop}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Runs the tests of `HttpOutcomes` for each row of the provider's tables."""
    if not hasattr(metafunc.cls, "table"):
        return
    if "case" in metafunc.fixturenames:
        cases = [*metafunc.cls.table, *metafunc.cls.rows.cases()]
        metafunc.parametrize("case", cases, ids=attrgetter("name"))
    for name, rows in (("check", metafunc.cls.checks), ("refusal", metafunc.cls.refused)):
        if name in metafunc.fixturenames:
            metafunc.parametrize(name, rows, ids=[f"{number} {row[-1]}" for number, row in enumerate(rows, 1)])


@pytest.fixture(autouse=True)
def without_system_certificates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hides the file with the system's certificates, which takes OpenSSL 20 ms to load for each TLS context. No test
    connects to a server that these certificates verify."""
    monkeypatch.setenv("SSL_CERT_FILE", os.devnull)


@pytest.fixture(autouse=True)
def forgotten_secrets() -> Iterator[None]:
    """After each test, no secret of its providers is removed from texts any more."""
    yield
    for source in (*BUILT_IN, "AWS"):
        OWN_SECRETS.register(source, ())


@dataclass(frozen=True, slots=True)
class Authority:
    """A certificate authority for tests: its certificate for clients, and the server's side of TLS for `127.0.0.1` and
    `localhost`, or for another host name (`elsewhere`), or with TLS 1.2 at most."""

    ca_file: Path
    server: ssl.SSLContext
    elsewhere: ssl.SSLContext
    server_of_tls_1_2: ssl.SSLContext


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """An authority that only clients with this `ca_file` trust."""
    ca = trustme.CA()
    ca_file = tmp_path_factory.mktemp("authority") / "ca.pem"
    ca.cert_pem.write_to_path(ca_file)
    old = _server_context(ca, "127.0.0.1", "localhost")
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    here, elsewhere = _server_context(ca, "127.0.0.1", "localhost"), _server_context(ca, "elsewhere.example")
    return Authority(ca_file, here, elsewhere, old)


def _server_context(ca: trustme.CA, *names: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ca.issue_cert(*names).configure_cert(context)
    return context
