"""The registry finds adapters by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dispatcher.config import BUILT_IN, load
from dispatcher.config.plugins import provider_class
from dispatcher.errors import ConfigurationError, ProviderFault
from dispatcher.providers.registry import check_provider, open_provider


def test_each_module_is_a_provider_with_the_modules_name() -> None:
    assert {"capture", "sendgrid", "ses", "smtp"} <= set(BUILT_IN)
    assert tuple(provider_class(name).name for name in BUILT_IN) == BUILT_IN


@pytest.mark.parametrize(("name", "variable"), [("smtp", "DISPATCHER_SMTP_URL"), ("capture", "DISPATCHER_CAPTURE_DIR")])
def test_an_adapter_without_its_settings_is_refused(name: str, variable: str) -> None:
    with pytest.raises(ConfigurationError, match=variable):
        open_provider(name, load({}))


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(
        ConfigurationError, match=f"has an unknown provider: 'pigeon'. Choose from: {', '.join(BUILT_IN)}"
    ):
        open_provider("pigeon", load({}))


def test_a_ca_file_without_certificates_is_refused(tmp_path: Path) -> None:
    ca_file = tmp_path / "ca.pem"
    ca_file.write_text("no certificate")
    settings = replace(load({"DISPATCHER_SMTP_URL": "smtps://smtp.example.org"}), ca_file=ca_file)

    with pytest.raises(ConfigurationError, match="DISPATCHER_CA_FILE"):
        open_provider("smtp", settings)


async def test_adapters_open_without_connecting_and_close(tmp_path: Path) -> None:
    settings = load({"DISPATCHER_SMTP_URL": "smtp://127.0.0.1:1", "DISPATCHER_CAPTURE_DIR": str(tmp_path / "maildir")})

    for name in ("smtp", "capture"):
        provider = open_provider(name, settings)
        assert provider.name == name
        await provider.close()

    assert not (tmp_path / "maildir").exists()


async def test_checking_a_provider_returns_a_report_or_raises_a_fault(tmp_path: Path) -> None:
    settings = load({"DISPATCHER_SMTP_URL": "smtp://127.0.0.1:1", "DISPATCHER_CAPTURE_DIR": str(tmp_path)})

    assert "writable" in await check_provider("capture", settings)
    with pytest.raises(ProviderFault, match=r"127\.0\.0\.1:1: no connection"):
        await check_provider("smtp", settings)
