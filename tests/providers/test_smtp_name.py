"""`dispatcher doctor` warns if EHLO contains an IP address, unless the server is on this host."""

from __future__ import annotations

import pytest

from dispatcher.cli.checks import CheckState, check_providers
from dispatcher.config import load


@pytest.mark.parametrize(
    ("host", "name", "server", "warns"),
    [
        ("web1", "", "mx.example.invalid", True),
        ("localhost.localdomain", "", "mx.example.invalid", True),
        ("web1.example.com", "", "mx.example.invalid", False),
        ("web1", "mail.example.com", "mx.example.invalid", False),
        ("web1", "[192.0.2.1]", "mx.example.invalid", False),
        ("web1", "", "127.0.0.1:1", False),
    ],
)
def test_an_ip_address_in_ehlo_is_a_warning(
    host: str, name: str, server: str, warns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: host)
    environ = {"DISPATCHER_PROVIDERS": "smtp", "DISPATCHER_SMTP_URL": f"smtp://{server}"}

    *warnings, _ = check_providers(load({**environ, "DISPATCHER_SMTP_EHLO_NAME": name}))

    assert [finding.state for finding in warnings] == [CheckState.WARNING] * warns
    assert all("DISPATCHER_SMTP_EHLO_NAME" in finding.detail for finding in warnings)
