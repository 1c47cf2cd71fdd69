"""Every client verifies its server's certificate, and notices when a connection is cut."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest

from dispatcher.transport.signed_post import trusting_context
from dispatcher.transport.tls import client_context, http_context
from tests.test_layers import FOLDER


def test_a_client_verifies_its_server_and_reports_a_cut_connection_as_an_error() -> None:
    context = client_context()

    assert context.verify_mode is ssl.CERT_REQUIRED
    assert context.check_hostname
    assert not context.options & ssl.OP_IGNORE_UNEXPECTED_EOF


def test_a_file_without_certificates_is_an_error(tmp_path: Path) -> None:
    empty = tmp_path / "empty.pem"
    empty.write_text("")

    with pytest.raises(OSError, match=r"PEM|certificate|X509"):
        client_context(empty)


def test_clients_of_http_share_a_context_until_the_certificates_are_read_again() -> None:
    before = trusting_context(None)

    assert http_context(None, None) is before
    http_context.cache_clear()
    assert http_context(None, None) is not before


def test_contexts_of_clients_come_from_one_place() -> None:
    makers = [path for path in FOLDER.rglob("*.py") if ".create_default_context" in path.read_text(encoding="utf-8")]

    assert [path.relative_to(FOLDER).as_posix() for path in makers] == ["transport/tls.py"]
