"""Asks botocore for SES's URL, the scope of signatures (region and service) and the trusted certificates.

botocore knows the rules for regions, FIPS and dual-stack endpoints, AWS_ENDPOINT_URL and profiles. So we let a client
of botocore prepare one request. The request is never sent, and the client is discarded.
"""

from __future__ import annotations

import functools
import logging
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import boto3
import botocore.session
from botocore.config import Config
from botocore.exceptions import BotoCoreError, DataNotFoundError
from botocore.httpsession import get_cert_path
from botocore.model import ServiceModel

from dispatcher.domain.scrub import scrub
from dispatcher.errors import ConfigurationError
from dispatcher.transport.http_proxy import HttpProxy, proxy_for
from dispatcher.transport.tls import client_context

SERVICE: Final = "sesv2"

_MODELS: Final = ("service-2", "endpoint-rule-set-1")
_DATA: Final = ("endpoints", "partitions", "sdk-default-configuration")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The URL for requests, without an operation's path, and the region and service in their signatures."""

    url: str
    region: str
    signing_name: str
    user_agent: str
    trusted: Path  # a file with the CA certificates to trust
    proxy: HttpProxy | None

    def url_of(self, operation: str) -> str:
        return f"{self.url}{_path_of(operation)}"

    @property
    def host(self) -> str:
        return urlsplit(self.url).netloc


class _Prepared(Exception):
    """Raised to stop boto3's call when the request is prepared but not sent."""


@functools.cache
def read_models() -> Any:
    """Reads all files that a client of botocore needs, before the fork, so that all workers share the 10 MB."""
    loader = botocore.session.Session().get_component("data_loader")
    # A botocore release that lacks some of these files does not need them, so a missing file is no error.
    with suppress(DataNotFoundError):
        for name in _MODELS:
            loader.load_service_model(SERVICE, name)
        for name in _DATA:
            loader.load_data(name)
    return loader


def _path_of(operation: str) -> str:
    model = ServiceModel(read_models().load_service_model(SERVICE, "service-2"), SERVICE)
    path: str = model.operation_model(operation).http["requestUri"]
    return path


def new_session(profile: str | None = None) -> botocore.session.Session:
    """A botocore session with the settings and credentials of the environment and the profile. If a profile is given,
    with its credentials only. Does not connect."""
    # At DEBUG, these loggers write whole emails and the request's signature.
    for name in ("botocore", "urllib3"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    session = botocore.session.Session(profile=profile)
    session.register_component("data_loader", read_models())
    return session


def endpoint_of(
    session: botocore.session.Session, region: str | None, endpoint_url: str | None = None, ca_file: Path | None = None
) -> Endpoint:
    """The endpoint that botocore would use. Does not connect. `ca_file`: certificates to trust instead of
    botocore's."""
    request, signed_for, user_agent = _prepared(session, region, endpoint_url)
    url = request.url.removesuffix(_path_of("SendEmail"))
    return Endpoint(
        url,
        region=signed_for["region"],
        signing_name=signed_for["signing_name"],
        user_agent=user_agent,
        trusted=_trusted(session, ca_file),
        proxy=proxy_for(url),
    )


def _prepared(
    session: botocore.session.Session, region: str | None, endpoint_url: str | None
) -> tuple[Any, dict[str, str], str]:
    """The request that botocore would send, its signing scope, and botocore's user agent."""
    seen: list[tuple[Any, dict[str, str]]] = []

    def note(request: Any, signing_name: str, region_name: str, signature_version: str, **_: object) -> None:
        if signature_version != "v4":
            raise ConfigurationError(
                [f"AWS's settings ask for signature version {signature_version}; only v4 is supported."]
            )
        asked = request.context.get("signing", {})
        seen.append((request, {"signing_name": signing_name, "region": region_name, **asked}))
        raise _Prepared

    try:
        client = boto3.Session(botocore_session=session).client(
            SERVICE,
            region_name=region,
            endpoint_url=endpoint_url,
            # Use dummy credentials, because this client sends nothing. A search for the account's own credentials could
            # take seconds.
            aws_access_key_id="none",
            aws_secret_access_key="none",  # noqa: S106
            config=Config(parameter_validation=False),
        )
        client.meta.events.register(f"before-sign.{SERVICE}.SendEmail", note)
        with suppress(_Prepared):
            client.send_email(Content={})
    except (BotoCoreError, ValueError) as error:
        raise ConfigurationError([f"botocore cannot use AWS's settings: {scrub(str(error))}."]) from error
    client.close()
    ((request, signed_for),) = seen
    return request, signed_for, client.meta.config.user_agent


def _trusted(session: botocore.session.Session, ca_file: Path | None) -> Path:
    """The file with the CA certificates to trust: `ca_file` if it is set, otherwise the file that botocore uses."""
    named = {
        "DISPATCHER_CA_FILE": ca_file,
        "AWS_CA_BUNDLE": session.get_config_variable("ca_bundle"),
        "REQUESTS_CA_BUNDLE": os.environ.get("REQUESTS_CA_BUNDLE"),
    }
    for variable, path in named.items():
        if path:
            try:
                client_context(path)
            except OSError as error:
                raise ConfigurationError([f"{variable} must be the path of a file with PEM certificates."]) from error
            return Path(path)
    return Path(get_cert_path(True))


def default_region(profile: str | None = None) -> str | None:
    """botocore's region from the environment or the profile; None if there is none."""
    try:
        region: str | None = botocore.session.Session(profile=profile).get_config_variable("region")
    except BotoCoreError as error:
        raise ConfigurationError([f"botocore cannot read its settings: {scrub(str(error))}."]) from error
    return region
