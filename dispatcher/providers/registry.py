"""Providers by name, built in or brought by a package; `config.plugins` finds them."""

from __future__ import annotations

from dispatcher.config import Settings
from dispatcher.config.plugins import provider_class
from dispatcher.errors import ConfigurationError
from dispatcher.providers.contract import CheckableProvider, ProviderClass


def class_of(name: str) -> ProviderClass:
    """The provider's class.

    Raises:
        ConfigurationError: there is none of this name, or it cannot be used.
    """
    try:
        found: ProviderClass = provider_class(name)
    except ValueError as error:
        raise ConfigurationError([f"DISPATCHER_PROVIDERS {error}."]) from error
    return found


def most_connections(name: str, settings: Settings) -> int:
    """How many connections, or files, one worker has open to this provider at most."""
    return min(settings.prefetch, settings.own[name].most_connections(settings))


def most_at_once(name: str, settings: Settings) -> int:
    """How many emails one worker has on the wire to this provider at most."""
    calls = settings.bulk_call_emails if hasattr(class_of(name), "send_many") else 1
    return min(settings.prefetch, most_connections(name, settings) * calls)


def open_provider(name: str, settings: Settings) -> CheckableProvider:
    """The adapter of this name, ready to send; connects to nobody yet. To be called after the fork.

    Raises:
        ConfigurationError: there is none of this name, or its settings are missing or unusable.
    """
    try:
        return class_of(name).open(settings)
    except OSError as error:  # ssl.SSLError is one
        raise ConfigurationError(["DISPATCHER_CA_FILE holds no certificates in PEM."]) from error


async def check_provider(name: str, settings: Settings) -> str:
    """What `dispatcher doctor` says of a provider that works: connects and signs in, sends nothing.

    Raises:
        ConfigurationError: its settings are missing or unusable.
        ProviderFault: it would not work; the message and the remedy say why.
    """
    provider = open_provider(name, settings)
    try:
        return await provider.check()
    finally:
        await provider.close()
