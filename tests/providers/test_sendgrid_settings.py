"""Invalid settings of the sendgrid adapter are refused with a helpful error."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from sendgrid.base_interface import region_host_dict

from dispatcher.config import every_setting, examine, load
from dispatcher.errors import ConfigurationError
from dispatcher.providers.registry import open_provider
from dispatcher.providers.sendgrid import SendGridSettings

KEY = "SG.the-key.nobody-may-see"
NAMED = {"DISPATCHER_PROVIDERS": "sendgrid"}


def test_a_missing_key_is_an_error() -> None:
    _, _, mistakes = examine(NAMED, needs=["providers"])

    assert mistakes == ("SENDGRID_API_KEY is not set, but DISPATCHER_PROVIDERS lists sendgrid: set it to a key.",)


def test_the_key_can_be_read_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "key").write_text(f"{KEY}\n")

    settings = load({**NAMED, "SENDGRID_API_KEY_FILE": str(tmp_path / "key")})

    assert settings.of(SendGridSettings).api_key == KEY


def test_config_does_not_show_the_key() -> None:
    settings = load({**NAMED, "SENDGRID_API_KEY": KEY})

    assert KEY not in repr(settings)


@pytest.mark.parametrize("key", ["SG.a b", "SG.ключ", "SG.a\nX-Other: 1"])
def test_an_invalid_key_is_an_error_that_does_not_repeat_it(key: str) -> None:
    _, _, mistakes = examine({**NAMED, "SENDGRID_API_KEY": key})

    (mistake,) = mistakes
    assert mistake.startswith("SENDGRID_API_KEY has a space")
    assert key not in mistake


def test_the_default_and_the_help_name_python_sendgrids_regions() -> None:
    assert load({}).of(SendGridSettings).host == region_host_dict["global"]
    about = next(each.about for each in every_setting() if each.variable == "DISPATCHER_SENDGRID_HOST")
    assert all(host in about for host in region_host_dict.values())


@pytest.mark.parametrize(
    ("host", "words"),
    [
        ("http://api.sendgrid.com", "without encryption"),
        ("https://api.sendgrid.com/v3", "must have only"),
        ("https://user:secret@api.sendgrid.com", "must have only"),
        ("https://api.sendgrid.com?x=1", "must have only"),
        ("api.sendgrid.com", "begins with https://"),
    ],
)
def test_an_invalid_host_is_an_error(host: str, words: str) -> None:
    _, _, mistakes = examine({"DISPATCHER_SENDGRID_HOST": host})

    (mistake,) = mistakes
    assert mistake.startswith("DISPATCHER_SENDGRID_HOST")
    assert words in mistake
    assert "secret" not in mistake


@pytest.mark.parametrize("host", ["http://127.0.0.1:8080", "http://localhost:1/", "https://api.eu.sendgrid.com/"])
def test_a_valid_host_is_accepted(host: str) -> None:
    assert load({"DISPATCHER_SENDGRID_HOST": host}).of(SendGridSettings).host == host.rstrip("/")


@pytest.mark.parametrize(("text", "is_on"), [("on", True), ("TRUE", True), ("1", True), ("off", False), ("no", False)])
def test_sandbox_mode_is_a_switch(text: str, is_on: bool) -> None:
    assert load({"DISPATCHER_SENDGRID_SANDBOX": text}).of(SendGridSettings).sandbox is is_on


def test_a_switch_is_on_or_off() -> None:
    _, _, mistakes = examine({"DISPATCHER_SENDGRID_SANDBOX": "perhaps"})

    assert mistakes == ("DISPATCHER_SENDGRID_SANDBOX must be on or off.",)


async def test_a_ca_file_without_certificates_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("nothing")
    settings = replace(load({**NAMED, "SENDGRID_API_KEY": KEY}), ca_file=tmp_path / "ca.pem")

    with pytest.raises(ConfigurationError, match="DISPATCHER_CA_FILE"):
        open_provider("sendgrid", settings)


async def test_the_adapter_opens_without_connecting() -> None:
    provider = open_provider("sendgrid", load({**NAMED, "SENDGRID_API_KEY": KEY}))

    assert provider.name == "sendgrid"
    await provider.close()
