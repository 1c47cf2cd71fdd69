"""Settings from the environment: read once at the edge, validated together, handed down as frozen values.

setting    what a setting is, and how one is read
values     what a setting's text may be: a parser for each kind
settings   every setting that is no provider's own
plugins    which providers there are, built in or brought by packages, with the settings that each declares
rules      what is wrong or doubtful about them together

Every setting is one field: its variable (`DISPATCHER_` and the field's name in capitals, unless it says otherwise),
default, parser and help stand in that one place, and `dispatcher config` prints them from there. A setting that holds
a secret may also be given as a file, by its variable with `_FILE` appended.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Final

from dispatcher.config import plugins, values
from dispatcher.config.rules import contradictions, doubts
from dispatcher.config.setting import PREFIX, Origin, Setting, SettingReader, setting, settings_in
from dispatcher.config.settings import (
    BUILT_IN,
    LOG_FORMATS,
    LOG_LEVELS,
    MAX_BUNDLE_EMAILS,
    QUEUE_TYPES,
    ProviderSettings,
    Settings,
)
from dispatcher.errors import ConfigurationError

__all__ = [
    "BUILT_IN",
    "LOG_FORMATS",
    "LOG_LEVELS",
    "MAX_BUNDLE_EMAILS",
    "PREFIX",
    "QUEUE_TYPES",
    "Origin",
    "ProviderSettings",
    "Setting",
    "Settings",
    "doubts",
    "every_setting",
    "examine",
    "load",
    "setting",
    "values",
]

_REMEDIES: Final = {
    "database_url": "set it to PostgreSQL's URL, like postgresql://user:password@host:5432/dispatcher",
    "amqp_url": "set it to RabbitMQ's URL, like amqp://user:password@host:5672/%2F",
    "providers": f"name who sends: {' or '.join(BUILT_IN)}. No default, so that no email is sent into nothing",
}


def every_setting(providers: Iterable[str] = BUILT_IN) -> list[Setting]:
    """The settings that are no provider's own, and those of these providers, as far as they can be loaded."""
    found = list(settings_in(Settings))
    for name in providers:
        try:
            found += plugins.own_settings(name)
        except ValueError:
            continue  # `examine` says why, and the caller has its mistakes
    return found


def load(environ: Mapping[str, str], *, needs: Collection[str] = ()) -> Settings:
    """The settings that an environment gives.

    Args:
        needs: Fields that must be set, because the command cannot work without them.

    Raises:
        ConfigurationError: with every mistake at once, each naming its variable and the remedy.
    """
    settings, _, mistakes = examine(environ, needs=needs)
    if mistakes:
        raise ConfigurationError(mistakes)
    return settings


def examine(
    environ: Mapping[str, str], *, needs: Collection[str] = (), reads_own: bool = True
) -> tuple[Settings, dict[str, Origin], tuple[str, ...]]:
    """The settings, the origin of each by variable, and every mistake; a mistaken setting stands at its default.

    Args:
        reads_own: Whether to read providers' own settings; to load the providers takes some 50 ms.
    """
    reading = SettingReader(environ)
    settings = reading.read(Settings)
    usable: list[str] = []
    own: dict[str, ProviderSettings] = {}
    for name in dict.fromkeys((*BUILT_IN, *settings.providers)):
        try:
            plugins.verify_name(name)
            if reads_own:
                own[name] = reading.read(plugins.provider_class(name).settings, plugins.prefix_of(name))
        except ValueError as error:
            reading.mistakes.append(f"DISPATCHER_PROVIDERS {error}.")
        else:
            usable.append(name)
    settings = replace(settings, providers=tuple(name for name in settings.providers if name in usable), own=own)
    unset = [name for name in needs if name in _REMEDIES and reading.origins[_variable(name)].text is None]
    mistakes = [
        f"{_variable(name)} is not set: {_REMEDIES[name]}." for name in unset if _variable(name) not in reading.mistaken
    ]
    if not reading.mistakes:
        # Who looks or enqueues sends nothing, and may lack what sending takes.
        mistakes += _provider_gaps(settings, reading.origins) if "providers" in needs else []
        mistakes += contradictions(settings)
    return settings, reading.origins, (*reading.mistakes, *mistakes)


def _variable(name: str) -> str:
    return PREFIX + name.upper()


def _provider_gaps(settings: Settings, origins: Mapping[str, Origin]) -> list[str]:
    """What the providers that are named need, and lack."""
    clashes = [clash for name in settings.providers if (clash := plugins.clash(name))]
    return clashes + [
        f"{each.variable} is not set, but DISPATCHER_PROVIDERS names {name}: {each.needed}."
        for name in settings.providers
        for each in plugins.own_settings(name)
        if each.needed and origins[each.variable].text is None
    ]
