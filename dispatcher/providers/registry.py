"""The adapters by name: the one place that a new provider is added to. `docs/providers.md` tells how to write one."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final, Protocol

from dispatcher.config import Settings
from dispatcher.errors import ConfigurationError
from dispatcher.providers.capture import CaptureProvider
from dispatcher.providers.contract import Provider
from dispatcher.providers.smtp import SmtpProvider
from dispatcher.transport.smtp_connection import SmtpOptions


class CheckableProvider(Provider, Protocol):
    """An adapter that can tell whether it would work, without sending."""

    async def check(self) -> str:
        """Words for `dispatcher doctor`; raises ProviderFault where it would not work."""
        ...


def _sendgrid(settings: Settings) -> CheckableProvider:
    # 120 ms, and a Rust runtime: only for workers that send with it.
    from dispatcher.providers.sendgrid import SendGridOptions, SendGridProvider

    options = SendGridOptions.from_settings(settings)
    try:
        return SendGridProvider(options)
    except (ssl.SSLError, OSError) as error:
        raise ConfigurationError(["DISPATCHER_CA_FILE holds no certificates in PEM."]) from error


def _ses(settings: Settings) -> CheckableProvider:
    # 200 ms and 20 MB, botocore and its models: only where it is named, and then in the parent, before the fork.
    from dispatcher.providers.ses import SesProvider
    from dispatcher.providers.ses_endpoint import SesOptions

    return SesProvider(SesOptions.from_settings(settings))


def _smtp(settings: Settings) -> CheckableProvider:
    options = SmtpOptions.from_settings(settings)
    try:
        return SmtpProvider(options)
    except (ssl.SSLError, OSError) as error:
        raise ConfigurationError(["DISPATCHER_CA_FILE holds no certificates in PEM."]) from error


def _capture(settings: Settings) -> CheckableProvider:
    if settings.capture_dir is None:
        raise ConfigurationError(["DISPATCHER_CAPTURE_DIR is not set: set it to a folder."])
    return CaptureProvider(settings.capture_dir)


ADAPTERS: Final[Mapping[str, Callable[[Settings], CheckableProvider]]] = MappingProxyType(
    {"sendgrid": _sendgrid, "ses": _ses, "smtp": _smtp, "capture": _capture}
)
"""By the provider's word in `DISPATCHER_PROVIDERS`; a test holds it against `config.KNOWN_PROVIDERS`."""


def most_connections(name: str, settings: Settings) -> int:
    """How many connections, or files, one worker has open to this provider at most."""
    ways = {"sendgrid": settings.http_connections, "ses": settings.ses_threads, "smtp": settings.smtp_connections}
    return min(settings.prefetch, ways.get(name, settings.prefetch))


def most_at_once(name: str, settings: Settings) -> int:
    """How many emails one worker has on the wire to this provider at most."""
    calls = settings.coalesce if name in ("sendgrid", "ses") else 1
    return min(settings.prefetch, most_connections(name, settings) * calls)


def open_provider(name: str, settings: Settings) -> Provider:
    """The adapter of this name, ready to send; connects to nobody yet. To be called after the fork.

    Raises:
        ConfigurationError: there is none of this name, or its settings are missing or unusable.
    """
    return _opened(name, settings)


async def check_provider(name: str, settings: Settings) -> str:
    """What `dispatcher doctor` says of a provider that works: connects and signs in, sends nothing.

    Raises:
        ConfigurationError: its settings are missing or unusable.
        ProviderFault: it would not work; the message and the remedy say why.
    """
    provider = _opened(name, settings)
    try:
        return await provider.check()
    finally:
        await provider.close()


def _opened(name: str, settings: Settings) -> CheckableProvider:
    if name not in ADAPTERS:
        known = " or ".join(ADAPTERS)
        raise ConfigurationError([f"DISPATCHER_PROVIDERS does not know {name}; known are: {known}."])
    return ADAPTERS[name](settings)
