"""Opens and checks providers by name: built-in providers and providers of installed packages."""

from __future__ import annotations

from dispatcher.config import Settings
from dispatcher.config.plugins import provider_class, renamed
from dispatcher.config.setting import secrets_in
from dispatcher.domain.accounts import account_of
from dispatcher.domain.scrub import OWN_SECRETS
from dispatcher.domain.values import replace
from dispatcher.errors import ConfigurationError, DispatcherError, ProviderFault
from dispatcher.providers.contract import CheckableProvider, ProviderClass


def class_of(name: str) -> ProviderClass:
    """The class of the provider with this name. Raises ConfigurationError if there is none, or it cannot be used."""
    try:
        found: ProviderClass = provider_class(name)
    except ValueError as error:
        raise ConfigurationError([f"DISPATCHER_PROVIDERS {error}."]) from error
    return found


def max_connections(name: str, settings: Settings) -> int:
    return min(settings.prefetch, settings.own[name].max_connections(settings))


def max_in_flight(name: str, settings: Settings) -> int:
    """The maximum number of emails that one worker has on the wire to this provider at the same time."""
    calls = settings.bulk_call_emails if hasattr(class_of(name), "send_bulk") else 1
    return min(settings.prefetch, max_connections(name, settings) * calls)


def open_provider(name: str, settings: Settings) -> CheckableProvider:
    """Creates the adapter of this name, without connecting. Call this after the fork.

    From then on, `scrub` removes the provider's secrets from texts. Raises ConfigurationError for a mistake in the
    settings.
    """
    kind = class_of(name)
    if account_of(name):
        settings = replace(settings, own={name: settings.own[name]})  # so that `settings.of` finds the account's
    OWN_SECRETS.register(name, *secrets_in(settings.of(kind.settings)))
    try:
        provider = kind.open(settings)
    except ConfigurationError as error:
        raise ConfigurationError([renamed(mistake, name) for mistake in error.mistakes]) from error
    except OSError as error:  # includes ssl.SSLError
        raise ConfigurationError(["DISPATCHER_CA_FILE must be the path of a file with PEM certificates."]) from error
    if account_of(name):
        try:
            provider.name = name  # type: ignore[misc]
        except AttributeError as error:
            mistake = f"DISPATCHER_PROVIDERS lists {name}, but the attribute `name` of its adapter cannot be set."
            raise ConfigurationError([mistake]) from error
    return provider


async def check_provider(name: str, settings: Settings) -> str:
    """Checks a provider for `dispatcher doctor`, and returns a report. Connects and logs in, and sends nothing."""
    provider = open_provider(name, settings)
    try:
        return await provider.check()
    except DispatcherError as error:
        words, remedy = renamed(error.message, name), error.remedy and renamed(error.remedy, name)
        raise ProviderFault(name, words, remedy=remedy) from error
    finally:
        await provider.close()
