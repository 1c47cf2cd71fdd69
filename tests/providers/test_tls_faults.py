"""For each cause of a failed TLS handshake, the fault names the cause, and its remedy helps. The servers are real."""

from __future__ import annotations

import socketserver
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import trustme

from dispatcher.broker.faults import reason
from dispatcher.config.values import SmtpServer
from dispatcher.errors import ProviderFault
from dispatcher.providers.sendgrid import SendGridProvider, SendGridSettings
from dispatcher.providers.smtp import SmtpProvider, SmtpSettings
from dispatcher.transport.destination import cause_of
from dispatcher.transport.tls_faults import tls_fault

DH_1024 = """
-----BEGIN X9.42 DH PARAMETERS-----
MIIBJwKBgQC2IwyiNuqQGduNsuCvP6tMENatkEoW6AeeVMJS72skoG7QPMtfUlLo
pDx2svNCnnLe3ky8B/j6H/OComQ/NfndmqkdrFasOPoD+jx3WjSpRHrkgZ946+UJ
4CCzbeso3fcrs+USxqS3U2OoGw4ED+IXyFvOTPFs8PvAec9yr4xALQKBgQCqYm5l
toMkc5HknqCC2axiv+lhPnB3WMbjlZk5WtUwO3/3LzO2KP+cocrRBf2Agk45pf0i
HKTzcyH25qqadH/csgDVeFc3bSajuDhib/JY+fpeWgT7tm6C8vv/V2A31OSWUmdm
SSJ0Qmaldu9gJUvVqt96d7PNwT0E3E1E7u3GQQIdAJh1B43zGPi/B/h7dwwrGha/
yaWDTZRL2PsC0P0=
-----END X9.42 DH PARAMETERS-----
"""
NOW = datetime.now(UTC)
DAY = timedelta(days=1)

Server = Callable[[trustme.CA, Path], ssl.SSLContext | None]


def _context(issued: trustme.LeafCert) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    issued.configure_cert(context)
    return context


def expired(ca: trustme.CA, _: Path) -> ssl.SSLContext:
    return _context(ca.issue_cert("127.0.0.1", not_before=NOW - 2 * DAY, not_after=NOW - DAY))


def not_yet_valid(ca: trustme.CA, _: Path) -> ssl.SSLContext:
    return _context(ca.issue_cert("127.0.0.1", not_before=NOW + DAY, not_after=NOW + 2 * DAY))


def of_another_host(ca: trustme.CA, _: Path) -> ssl.SSLContext:
    return _context(ca.issue_cert("elsewhere.example"))


def of_an_unknown_authority(_ca: trustme.CA, _: Path) -> ssl.SSLContext:
    return _context(trustme.CA().issue_cert("127.0.0.1"))


def with_a_small_dh_key(ca: trustme.CA, folder: Path) -> ssl.SSLContext:
    context = _context(ca.issue_cert("127.0.0.1", key_type=trustme.KeyType.RSA))
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers("DHE-RSA-AES128-GCM-SHA256:@SECLEVEL=0")
    (folder / "dh.pem").write_text(DH_1024)
    context.load_dh_params(str(folder / "dh.pem"))
    return context


def with_old_tls(ca: trustme.CA, _: Path) -> ssl.SSLContext:
    context = _context(ca.issue_cert("127.0.0.1", key_type=trustme.KeyType.RSA))
    context.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.deprecated_call():
        context.minimum_version = ssl.TLSVersion.TLSv1
        context.maximum_version = ssl.TLSVersion.TLSv1_1
    return context


def with_old_ciphers(ca: trustme.CA, _: Path) -> ssl.SSLContext:
    context = _context(ca.issue_cert("127.0.0.1", key_type=trustme.KeyType.RSA))
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers("AES128-SHA:@SECLEVEL=0")
    return context


def without_tls(_ca: trustme.CA, _: Path) -> None:
    return None


CASES: list[tuple[Server, str, str]] = [
    (expired, "certificate has expired", "Renew the server's certificate."),
    (not_yet_valid, "certificate is not yet valid", "Correct this host's clock."),
    (of_another_host, "not valid for '127.0.0.1'", "Correct the host in SOME_URL"),
    (of_an_unknown_authority, "unable to get local issuer certificate", "Set DISPATCHER_CA_FILE"),
    (with_a_small_dh_key, "Diffie-Hellman key is too small (DH_KEY_TOO_SMALL)", "Diffie-Hellman key of at least 2048"),
    (with_old_tls, "only old versions of TLS", "TLS 1.2 or newer"),
    (with_old_ciphers, "no cipher that we accept", "ECDHE"),
    (without_tls, "does not answer with TLS", "Check the scheme and the port in SOME_URL"),
]


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


@pytest.mark.parametrize(("server", "words", "remedy"), CASES, ids=[server.__name__ for server, *_ in CASES])
async def test_each_cause_has_its_words_and_its_remedy(tmp_path: Path, server: Server, words: str, remedy: str) -> None:
    ca, ca_file = trustme.CA(), tmp_path / "ca.pem"
    ca.cert_pem.write_to_path(ca_file)
    with listening(server(ca, tmp_path)) as port:
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
