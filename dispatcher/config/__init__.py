"""Settings from the environment: read once when a process starts, validated together, and passed on as frozen values.

setting    declares and reads one setting
values     parsers that convert a setting's text to its value, one for each kind of value
settings   every setting except those that belong to one provider
plugins    the providers, built in or from installed packages, and the settings that each provider declares
rules      checks that involve several settings

Each setting is one field, which declares its variable (by default `DISPATCHER_` and the field's name in capitals), its
default, parser and help. `dispatcher config` prints all settings. A secret may also be read from a file: set the
variable `NAME_FILE` to the file's path, instead of the variable `NAME`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Final

from dispatcher.config import plugins, values
from dispatcher.config.rules import contradictions, suspicious_settings
from dispatcher.config.setting import PREFIX, Origin, Setting, SettingReader, setting, settings_in
from dispatcher.config.settings import (
    BUILT_IN,
    EMAIL_PROVIDERS,
    LOG_FORMATS,
    LOG_LEVELS,
    MAX_BUNDLE_EMAILS,
    QUEUE_TYPES,
    SMS_PROVIDERS,
    ProviderSettings,
    Settings,
)
from dispatcher.domain.accounts import account_of, provider_of
from dispatcher.errors import ConfigurationError

__all__ = [
    "BUILT_IN",
    "EMAIL_PROVIDERS",
    "LOG_FORMATS",
    "LOG_LEVELS",
    "MAX_BUNDLE_EMAILS",
    "PREFIX",
    "QUEUE_TYPES",
    "SMS_PROVIDERS",
    "Origin",
    "ProviderSettings",
    "Setting",
    "Settings",
    "every_setting",
    "examine",
    "load",
    "setting",
    "suspicious_settings",
    "values",
]

_REMEDIES: Final = {
    "database_url": "set it to the URL of PostgreSQL, such as postgresql://user:password@host:5432/dispatcher",
    "amqp_url": "set it to the URL of RabbitMQ, such as amqp://user:password@host:5672/%2F",
    "providers": f"set it to at least one of: {', '.join(EMAIL_PROVIDERS)}",
}


def every_setting(providers: Iterable[str] = BUILT_IN) -> list[Setting]:
    """The general settings, and the settings of these providers and accounts. Skips those that cannot be loaded."""
    found = list(settings_in(Settings))
    for name in providers:
        try:
            found += plugins.own_settings(name)
            found += plugins.events_settings(name)
        except ValueError:
            continue  # `examine` reports the mistake
    return found


def load(environ: Mapping[str, str], *, needs: Collection[str] = ()) -> Settings:
    """Reads the settings from an environment. Raises ConfigurationError, which lists every mistake with its variable
    and the remedy. The fields in `needs` must be set, because the command needs them."""
    settings, _, mistakes = examine(environ, needs=needs)
    if mistakes:
        raise ConfigurationError(mistakes)
    return settings


def examine(
    environ: Mapping[str, str], *, needs: Collection[str] = (), reads_own: bool = True
) -> tuple[Settings, dict[str, Origin], tuple[str, ...]]:
    """Reads the settings; an invalid one gets its default. Returns them; for each variable, where its value comes from;
    and a sentence for each mistake.

    If `reads_own`, reads the settings of every provider, too, which takes about 50 ms; otherwise only those of the
    providers in use, if `needs` contains "providers".
    """
    reading = SettingReader(environ)
    settings = reading.read(Settings)
    usable: list[str] = []
    own: dict[str, ProviderSettings] = {}
    configured = (*settings.providers, *settings.sms_providers)
    # The monitor reads the bounces of emails that other hosts may have sent over SMTP.
    used = (*configured, "smtp") if settings.bounce_maildir else configured
    read = (*BUILT_IN, *configured) if reads_own else used if "providers" in needs else ()
    # An account is read after its provider, because it has the values of its provider.
    providers_of = tuple(map(provider_of, read))
    for name in dict.fromkeys((*BUILT_IN, *providers_of, *configured)):
        try:
            plugins.verify_name(name)
            if name in read or name in providers_of:
                own[name] = _read_own(reading, name)
        except ValueError as error:
            if name not in configured and name not in BUILT_IN:
                continue  # its account has the same mistake
            variable = "providers" if name in settings.providers else "sms_providers"
            reading.mistakes.append(f"{_variable(variable)} {error}.")
        else:
            usable.append(name)
    account_events = {
        name: found for name in usable for each in plugins.events_settings(name) for found in reading.read_one(each)
    }
    reading.mistakes += _wrong_channels(settings)
    # From here on, the providers of emails and of SMS are in one list, because routing reads a provider's channel from
    # the provider's capabilities.
    providers = tuple(dict.fromkeys(name for name in configured if name in usable))
    unset = [name for name in needs if name in _REMEDIES and reading.origins[_variable(name)].text is None]
    if settings.sms_providers:
        unset = [name for name in unset if name != "providers"]
    settings = replace(settings, providers=providers, own=own, account_events=account_events)
    if read and reading.origins[_variable("sms_countries")].text is None:
        # A process that does not know the senders leaves the countries to the hosts that send.
        settings = replace(settings, sms_countries=_sender_countries(settings) or None)
    mistakes = [
        f"{_variable(name)} is not set: {_REMEDIES[name]}." for name in unset if _variable(name) not in reading.invalid
    ]
    if not reading.mistakes:
        # Only commands that send emails need the providers' settings.
        mistakes += _provider_gaps(settings, reading.origins) if "providers" in needs else []
        mistakes += contradictions(settings)
    return settings, reading.origins, (*reading.mistakes, *mistakes)


def _read_own(reading: SettingReader, name: str) -> ProviderSettings:
    """Raises ValueError if there is no such provider or account."""
    kind: type[ProviderSettings] = plugins.provider_class(name).settings
    account = account_of(name)
    shared = plugins.own_settings(provider_of(name)) if account else ()
    return reading.read(kind, plugins.prefix_of(name), account, shared)


def _lists(provider: str) -> str:
    return _variable("sms_providers" if provider in SMS_PROVIDERS else "providers")


def _variable(name: str) -> str:
    return PREFIX + name.upper()


def _wrong_channels(settings: Settings) -> list[str]:
    wrong = [(name, "providers", "SMS") for name in settings.providers if name in SMS_PROVIDERS]
    wrong += [
        (name, "sms_providers", "emails") for name in settings.sms_providers if provider_of(name) in EMAIL_PROVIDERS
    ]
    return [
        f"{_variable(setting)} lists {name}, which sends {what}: list it in {_lists(name)} instead."
        for name, setting, what in wrong
    ]


def _sender_countries(settings: Settings) -> frozenset[str] | None:
    """The countries of the default senders of all providers that deliver SMS; None if there is no such provider."""
    read = {name: plugins.provider_class(name).capabilities for name in settings.providers if name in settings.own}
    able = [name for name, capabilities in read.items() if capabilities.channel == "sms" and capabilities.delivers]
    return frozenset().union(*(settings.own[name].sender_countries() for name in able)) if able else None


def _provider_gaps(settings: Settings, origins: Mapping[str, Origin]) -> list[str]:
    """A sentence for each mistake that matters only for sending."""
    gaps = [f"DISPATCHER_PROVIDERS: {clash}" for name in settings.providers if (clash := plugins.clash(name))]
    readers: dict[str, str] = {}
    for name in dict.fromkeys((*map(provider_of, settings.providers), *settings.providers)):
        gaps += [  # one would use the login of the other
            f"DISPATCHER_PROVIDERS: {other} and {name} would both read {each.variable}. Rename one."
            for each in plugins.own_settings(name)
            if (other := readers.setdefault(each.variable, name)) != name and (account_of(name) or account_of(other))
        ]
    if origins[_variable("sms_countries")].text is None and _sender_countries(settings) == frozenset():
        gaps.append(
            "DISPATCHER_SMS_COUNTRIES is not set, and no default sender of SMS is a number that shows a country: list "
            "the countries to which SMS may be sent, such as DE,AT, or set all."
        )
    return gaps + [
        f"{each.variable} is not set, but {_lists(name)} lists {name}: {each.needed}."
        for name in settings.providers
        for each in plugins.own_settings(name)
        if each.needed and origins[each.variable].text is None
    ]
