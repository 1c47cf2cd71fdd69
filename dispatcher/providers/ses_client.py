"""The sesv2 client: boto3's, told to post once per call, in time, and to say nothing in logs.

The package reads its models, several megabytes of JSON, before the fork; the client, with its credentials and
connections, is made after it.
"""

from __future__ import annotations

import functools
import logging
import ssl
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import boto3.session
import botocore.session
from botocore.config import Config
from botocore.exceptions import BotoCoreError, DataNotFoundError

from dispatcher.config import Settings
from dispatcher.errors import ConfigurationError, ProviderFault
from dispatcher.providers.scrub import scrub
from dispatcher.providers.ses_wire import watch

NAME: Final = "ses"
SERVICE: Final = "sesv2"
CONNECT_SECONDS: Final = 10.0
"""For TCP, to each of the endpoint's addresses; the attempt's own deadline may be sooner."""
ONE_POST: Final = {"mode": "standard", "total_max_attempts": 1}
"""boto3 left alone posts up to three times where an answer got lost: two of them are duplicates."""

_MODELS: Final = ("service-2", "endpoint-rule-set-1")
_DATA: Final = ("endpoints", "partitions", "sdk-default-configuration")


class Client(Protocol):
    """What we use of boto3's untyped client."""

    @property
    def meta(self) -> Any:
        """Its effective settings."""
        ...

    def send_email(self, **parameters: object) -> Mapping[str, Any]:
        """SendEmail: https://docs.aws.amazon.com/ses/latest/APIReference-V2/API_SendEmail.html"""
        ...

    def send_bulk_email(self, **parameters: object) -> Mapping[str, Any]:
        """SendBulkEmail: https://docs.aws.amazon.com/ses/latest/APIReference-V2/API_SendBulkEmail.html"""
        ...

    def get_account(self) -> Mapping[str, Any]:
        """GetAccount: https://docs.aws.amazon.com/ses/latest/APIReference-V2/API_GetAccount.html"""
        ...

    def close(self) -> None:
        """End its connections."""
        ...


@dataclass(frozen=True, slots=True)
class SesOptions:
    """What the adapter needs to know; credentials are boto3's own business.

    Attributes:
        region: None leaves it to boto3: AWS_DEFAULT_REGION, or the profile's.
        endpoint_url: Instead of the region's own.
        threads: Emails on the wire at once.
        timeout_seconds: The longest that an attempt may take, and so boto3's wait for one read.
        ca_file: Certificates to trust instead of boto3's.
    """

    region: str | None = None
    endpoint_url: str | None = None
    configuration_set: str | None = None
    threads: int = 16
    timeout_seconds: float = 30.0
    ca_file: Path | None = None

    @classmethod
    def from_settings(cls, settings: Settings) -> SesOptions:
        """The options that the settings give.

        Raises:
            ConfigurationError: no region is named anywhere.
        """
        region = settings.ses_region or _default_region()
        if region is None:
            raise ConfigurationError(
                ["AWS_REGION is not set, but DISPATCHER_PROVIDERS names ses: set it to SES's region, like eu-west-1."]
            )
        return cls(
            region,
            settings.ses_endpoint_url,
            settings.ses_configuration_set,
            settings.ses_threads,
            settings.send_timeout_seconds,
            settings.ca_file,
        )


def check_ca_file(ca_file: Path) -> None:
    """Makes sure of the file before the first email needs it.

    Raises:
        ssl.SSLError, OSError: it holds no certificates.
    """
    ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cafile=str(ca_file))


@functools.cache
def read_models() -> Any:
    """boto3's loader with all that a client reads from disk: 10 MB, which workers share if this is before the fork."""
    loader = botocore.session.Session().get_component("data_loader")
    # What another release of boto3 does not have, it does not need.
    with suppress(DataNotFoundError):
        for name in _MODELS:
            loader.load_service_model(SERVICE, name)
        for name in _DATA:
            loader.load_data(name)
    return loader


def new_client(options: SesOptions) -> Client:
    """A client that has connected to nobody, unless the credentials come from a server; may take seconds then.

    Raises:
        ProviderFault: boto3 cannot make one, or would post more than once.
    """
    quieten()
    session = botocore.session.Session()
    session.register_component("data_loader", read_models())
    config = Config(
        retries=dict(ONE_POST),
        connect_timeout=min(CONNECT_SECONDS, options.timeout_seconds),
        read_timeout=options.timeout_seconds,
        max_pool_connections=options.threads,
    )
    try:
        client: Client = boto3.session.Session(botocore_session=session, region_name=options.region).client(
            SERVICE,
            endpoint_url=options.endpoint_url,
            verify=str(options.ca_file) if options.ca_file else None,
            config=config,
        )
    except (BotoCoreError, ValueError) as error:
        raise ProviderFault(
            NAME, f"boto3 cannot be set up: {scrub(str(error))}", remedy="Check the AWS_ variables and profile."
        ) from error
    assert_one_post(client)
    watch(client)
    return client


def assert_one_post(client: Client) -> None:
    """Makes sure that boto3 took our word over the environment's and the profile's.

    Raises:
        ProviderFault: it would post again where an answer got lost.
    """
    if client.meta.config.retries != ONE_POST:
        raise ProviderFault(
            NAME,
            "boto3 would post an email more than once.",
            remedy="Install the versions that stand in requirements/runtime.txt.",
        )


def quieten() -> None:
    """Keeps boto3's loggers from saying anything: at DEBUG they print whole emails and the request's signature."""
    for name in ("boto3", "botocore", "urllib3"):
        logging.getLogger(name).setLevel(logging.CRITICAL)


def _default_region() -> str | None:
    try:
        region: str | None = botocore.session.Session().get_config_variable("region")
    except BotoCoreError as error:
        raise ConfigurationError([f"boto3 cannot read its settings: {scrub(str(error))}."]) from error
    return region
