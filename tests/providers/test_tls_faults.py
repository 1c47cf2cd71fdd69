"""For each cause of a failed TLS handshake, the fault names the cause, and its remedy helps. The servers are real."""

from __future__ import annotations

import socketserver
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import trustme

from dispatcher.broker.faults import reason
from dispatcher.config.values import SmtpServer
from dispatcher.errors import ProviderFault
from dispatcher.providers.sendgrid import SendGridProvider, SendGridSettings
from dispatcher.providers.smtp import SmtpProvider, SmtpSettings
from dispatcher.transport.destination import cause_of
from dispatcher.transport.tls_faults import tls_fault

NOW = datetime.now(UTC)
DAY = timedelta(days=1)

RSA = {"key_type": trustme.KeyType.RSA}
OLD_CIPHERS = "AES128-SHA:@SECLEVEL=0"

CASES: list[tuple[str, dict[str, Any], str, str, str]] = [
    ("expired", {"not_before": NOW - 2 * DAY, "not_after": NOW - DAY}, "", "has expired", "Renew the server's"),
    ("too young", {"not_before": NOW + DAY, "not_after": NOW + 2 * DAY}, "", "is not yet valid", "this host's clock."),
    ("another host", {}, "", "not valid for '127.0.0.1'", "Correct the host in SOME_URL"),
    ("unknown authority", {}, "", "unable to get local issuer certificate", "Set DISPATCHER_CA_FILE"),
    ("old TLS", RSA, "ALL:@SECLEVEL=0", "only old versions of TLS", "TLS 1.2 or newer"),
    ("old ciphers", RSA, OLD_CIPHERS, "no cipher that we accept", "ECDHE"),
    ("no TLS", {}, "", "does not answer with TLS", "Check the scheme and the port in SOME_URL"),
]


def context_of(kind: str, certificate: dict[str, Any], ciphers: str, ca: trustme.CA) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    host = "elsewhere.example" if kind == "another host" else "127.0.0.1"
    issuer = trustme.CA() if kind == "unknown authority" else ca
    issuer.issue_cert(host, **certificate).configure_cert(context)
    if ciphers:
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        context.set_ciphers(ciphers)
    if kind == "old TLS":
        with pytest.deprecated_call():
            context.minimum_version = ssl.TLSVersion.TLSv1
            context.maximum_version = ssl.TLSVersion.TLSv1_1
    return context


@contextmanager
def listening(context: ssl.SSLContext | None) -> Iterator[int]:
    """Runs a server in a thread, which sends TLS's alerts before it closes a connection; yields the server's port."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with suppress(OSError):
                if context is None:
                    self.request.sendall(b"220 mail.example ESMTP\r\n")
                else:
                    context.wrap_socket(self.request, server_side=True).recv(1)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(("kind", "certificate", "ciphers", "words", "remedy"), CASES, ids=[row[0] for row in CASES])
async def test_each_cause_has_its_words_and_its_remedy(
    kind: str, certificate: dict[str, Any], ciphers: str, words: str, remedy: str, tmp_path: Path
) -> None:
    ca, ca_file = trustme.CA(), tmp_path / "ca.pem"
    ca.cert_pem.write_to_path(ca_file)
    context = None if kind == "no TLS" else context_of(kind, certificate, ciphers, ca)
    with listening(context) as port:
        smtp = SmtpProvider(SmtpSettings(url=SmtpServer("127.0.0.1", port, "tls")), ca_file=ca_file)
        settings = SendGridSettings(api_key="key", host=f"https://127.0.0.1:{port}")
        sendgrid = SendGridProvider(settings, connections=1, ca_file=ca_file)
        with pytest.raises(ProviderFault) as over_smtp:
            await smtp.check()
        with pytest.raises(ProviderFault) as over_http:
            await sendgrid.check()

    assert over_smtp.value.message.startswith("TLS with the SMTP server failed: ")
    assert over_http.value.message.startswith("TLS with SendGrid failed: ")
    for fault, url in ((over_smtp.value, "DISPATCHER_SMTP_URL"), (over_http.value, "DISPATCHER_SENDGRID_HOST")):
        assert words in fault.message
        assert fault.remedy is not None
        assert remedy.replace("SOME_URL", url) in fault.remedy


def test_webhooks_and_rabbitmq_name_the_cause_in_the_same_words() -> None:
    error = ssl.SSLError(1, "[SSL: WRONG_VERSION_NUMBER] wrong version number")
    error.reason = "WRONG_VERSION_NUMBER"

    for words in (cause_of(error), reason(error)):
        assert "the server does not answer with TLS (WRONG_VERSION_NUMBER)" in words


@pytest.mark.parametrize(
    "error", [ssl.SSLEOFError(), ssl.SSLZeroReturnError(), ssl.SSLSyscallError(), ConnectionResetError(), None]
)
def test_a_connection_that_breaks_during_the_handshake_is_no_fault(error: BaseException | None) -> None:
    assert tls_fault("smtp", "the SMTP server", error, url="SOME_URL") is None
