"""Where SES is, what requests are signed for and which certificates are trusted: as botocore would have it.

The region, FIPS and dual-stack endpoints, AWS_ENDPOINT_URL and the profile are its business. Its client prepares one
request, which never leaves; the client is forgotten afterwards.
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
    """Where requests go, and what they are signed for.

    Attributes:
        url: What comes before an operation's path.
        region: That the signature names.
        signing_name: The service that the signature names.
        trusted: Certificates to trust.
    """

    url: str
    region: str
    signing_name: str
    user_agent: str
    trusted: Path
    proxy: HttpProxy | None

    def url_of(self, operation: str) -> str:
        """An operation's URL."""
        return f"{self.url}{_path_of(operation)}"

    @property
    def host(self) -> str:
        """The header `Host`."""
        return urlsplit(self.url).netloc


class _Prepared(Exception):
    """Ends boto3's call once the request is prepared."""


@functools.cache
def read_models() -> Any:
    """botocore's loader with all that a client reads from disk: 10 MB, shared by workers if read before the fork."""
    loader = botocore.session.Session().get_component("data_loader")
    # What another release of botocore does not have, it does not need.
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


def new_session() -> botocore.session.Session:
    """botocore's settings and credentials, out of the environment and the profile; connects to nobody."""
    # At DEBUG they print whole emails and the request's signature.
    for name in ("botocore", "urllib3"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    session = botocore.session.Session()
    session.register_component("data_loader", read_models())
    return session


def endpoint_of(
    session: botocore.session.Session, region: str | None, endpoint_url: str | None = None, ca_file: Path | None = None
) -> Endpoint:
    """Where botocore would send an email, and how it would sign it; connects to nobody.

    Args:
        region: None leaves it to botocore: AWS_DEFAULT_REGION, or the profile's.
        endpoint_url: Instead of the region's own.
        ca_file: Certificates to trust instead of botocore's.

    Raises:
        ConfigurationError: botocore's settings, the proxy or the certificates cannot be used.
    """
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
    """The request that botocore would send, what it would sign it for, and how it would call itself."""
    seen: list[tuple[Any, dict[str, str]]] = []

    def note(request: Any, signing_name: str, region_name: str, signature_version: str, **_: object) -> None:
        if signature_version != "v4":
            raise ConfigurationError([f"SES's requests cannot be signed as AWS's settings ask ({signature_version})."])
        asked = request.context.get("signing", {})
        seen.append((request, {"signing_name": signing_name, "region": region_name, **asked}))
        raise _Prepared

    try:
        client = boto3.Session(botocore_session=session).client(
            SERVICE,
            region_name=region,
            endpoint_url=endpoint_url,
            # Not the account's: to look for those may take seconds.
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
    """The certificates that botocore would trust."""
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
                raise ConfigurationError([f"{variable} names a file that holds no certificates in PEM."]) from error
            return Path(path)
    return Path(get_cert_path(True))


def default_region() -> str | None:
    """The region that botocore finds in the environment or the profile; None if it finds none."""
    try:
        region: str | None = botocore.session.Session().get_config_variable("region")
    except BotoCoreError as error:
        raise ConfigurationError([f"botocore cannot read its settings: {scrub(str(error))}."]) from error
    return region
