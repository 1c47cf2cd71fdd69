"""The ses adapter uses the same endpoint, signing scope and trusted certificates as botocore."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from dispatcher.config import load
from dispatcher.domain.outcome import Accepted
from dispatcher.errors import ConfigurationError
from dispatcher.providers.registry import open_provider
from dispatcher.providers.ses import SesSettings, region_of
from dispatcher.providers.ses.endpoint import Endpoint, endpoint_of, new_session
from dispatcher.transport.http_proxy import HttpProxy
from tests.providers.conftest import Authority
from tests.providers.emails import an_email, send
from tests.providers.ses_place import REGION, aws_environment, ses_place

FIPS, DUALSTACK = {"AWS_USE_FIPS_ENDPOINT": "true"}, {"AWS_USE_DUALSTACK_ENDPOINT": "true"}
PROXY = {"HTTPS_PROXY": "http://proxy.example.com:3128"}


def endpoint(
    environment: Mapping[str, str] | None = None, region: str | None = REGION, url: str | None = None
) -> Endpoint:
    with aws_environment(**(environment or {})):
        return endpoint_of(new_session(), region, url)


@pytest.mark.parametrize(
    ("region", "environment", "url"),
    [
        ("eu-west-1", {}, "https://email.eu-west-1.amazonaws.com"),
        ("cn-north-1", {}, "https://email.cn-north-1.amazonaws.com.cn"),
        ("eusc-de-east-1", {}, "https://email.eusc-de-east-1.amazonaws.eu"),
        ("us-iso-east-1", {}, "https://email.us-iso-east-1.c2s.ic.gov"),
        ("us-east-1", FIPS, "https://email-fips.us-east-1.amazonaws.com"),
        ("us-east-1", DUALSTACK, "https://email.us-east-1.api.aws"),
        ("us-gov-west-1", {**DUALSTACK, **FIPS}, "https://email-fips.us-gov-west-1.api.aws"),
        ("eu-west-1", {"AWS_ENDPOINT_URL": "https://vpce.example.com/ses"}, "https://vpce.example.com/ses"),
        ("eu-west-1", {"AWS_ENDPOINT_URL_SESV2": "https://vpce.example.com"}, "https://vpce.example.com"),
    ],
)
def test_the_endpoint_equals_botocores(region: str, environment: dict[str, str], url: str) -> None:
    found = endpoint(environment, region)

    assert found.url == url
    assert (found.region, found.signing_name) == (region, "ses")
    assert found.url_of("SendEmail") == f"{url}/v2/email/outbound-emails"
    assert found.url_of("SendBulkEmail") == f"{url}/v2/email/outbound-bulk-emails"
    assert found.url_of("GetAccount") == f"{url}/v2/email/account"


@pytest.mark.parametrize(
    ("environment", "region"),
    [
        ({"AWS_REGION": "eu-north-1"}, "eu-north-1"),
        ({"AWS_DEFAULT_REGION": "us-east-1"}, "us-east-1"),
        ({"AWS_REGION": "eu-north-1", "AWS_DEFAULT_REGION": "us-east-1"}, "eu-north-1"),
        ({"AWS_CONFIG_FILE": "{folder}/config"}, "ap-south-1"),
    ],
)
def test_the_region_comes_from_the_first_variable_that_is_set_or_from_the_profile(
    environment: dict[str, str], region: str, tmp_path: Path
) -> None:
    (tmp_path / "config").write_text("[default]\nregion = ap-south-1\n")
    environment = {name: value.format(folder=tmp_path) for name, value in environment.items()}

    with aws_environment(**environment):
        assert region_of(load(environment).of(SesSettings)) == region


def test_our_own_setting_overrides_aws_endpoint_url() -> None:
    found = endpoint({"AWS_ENDPOINT_URL": "https://other.example.com"}, url="https://ours.example.com:8443")

    assert found.url == "https://ours.example.com:8443"
    assert found.host == "ours.example.com:8443"


def test_the_profile_is_used(tmp_path: Path, authority: Authority) -> None:
    profile, ca_file = tmp_path / "config", authority.ca_file
    profile.write_text(f"[profile mail]\nregion = us-west-2\nuse_fips_endpoint = true\nca_bundle = {ca_file}\n")

    found = endpoint({"AWS_CONFIG_FILE": str(profile), "AWS_PROFILE": "mail"}, region=None)

    url = "https://email-fips.us-west-2.amazonaws.com"
    assert (found.url, found.region, found.trusted) == (url, "us-west-2", ca_file)


def test_resolving_the_endpoint_calls_no_server(tmp_path: Path) -> None:
    """The test fails if the adapter calls SES, or runs the program that the profile sets for credentials."""
    ran = tmp_path / "ran"
    profile = tmp_path / "config"
    profile.write_text(f"[default]\ncredential_process = /usr/bin/touch {ran}\n")

    endpoint({"AWS_CONFIG_FILE": str(profile), "AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""})

    assert not ran.exists()


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"AWS_ENDPOINT_URL": "no url"}, "AWS's settings"),
        ({"AWS_PROFILE": "nobody"}, "nobody"),
        ({"AWS_REGION": ""}, "AWS_REGION is not set"),
        ({"AWS_CA_BUNDLE": "/dev/null"}, "AWS_CA_BUNDLE"),
        ({"HTTPS_PROXY": "https://proxy.example.com"}, "HTTPS_PROXY must have the form http://host:port"),
        ({"HTTPS_PROXY": "socks5://proxy.example.com"}, "NO_PROXY=email.eu-west-1.amazonaws.com"),
        ({"HTTPS_PROXY": "http://proxy.example.com:port"}, "HTTPS_PROXY must be a URL"),
        ({"AWS_ENDPOINT_URL": "http://mail.example.com", "HTTP_PROXY": "http://p:1"}, "HTTP_PROXY sets a proxy"),
    ],
)
def test_unusable_settings_are_refused_at_the_start(environment: dict[str, str], words: str) -> None:
    with aws_environment(**environment), pytest.raises(ConfigurationError, match=words) as refusal:
        open_provider("ses", load({"AWS_REGION": REGION, **environment}))

    assert len(refusal.value.mistakes) == 1


@pytest.mark.parametrize(
    ("environment", "proxy"),
    [
        ({}, None),
        (PROXY, HttpProxy("proxy.example.com", 3128)),
        ({"https_proxy": "proxy.example.com:3128"}, HttpProxy("proxy.example.com", 3128)),
        ({"HTTPS_PROXY": "http://proxy.example.com"}, HttpProxy("proxy.example.com", 80)),
        ({"HTTPS_PROXY": "http://ann:s%40fe@[::1]:8080"}, HttpProxy("::1", 8080, "ann:s@fe")),
        ({**PROXY, "NO_PROXY": "amazonaws.com"}, None),
        ({**PROXY, "NO_PROXY": "example.com"}, HttpProxy("proxy.example.com", 3128)),
        ({"HTTP_PROXY": "http://proxy.example.com:3128"}, None),
    ],
)
def test_the_proxy_comes_from_the_environment(environment: dict[str, str], proxy: HttpProxy | None) -> None:
    found = endpoint(environment)

    assert found.proxy == proxy
    assert "s@fe" not in repr(found)


@pytest.mark.parametrize("variable", ["AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE"])
async def test_the_trusted_certificates_equal_botocores(variable: str, tmp_path: Path, authority: Authority) -> None:
    environment = {variable: str(authority.ca_file)}
    async with ses_place(tmp_path, tls=authority.server, environment=environment) as place:
        assert isinstance((await send(place.provider, an_email())).outcome, Accepted)
