"""Loads a command's settings from the env file and the environment. Warns about variables that have no effect."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Final

from dispatcher.cli.env_file import VARIABLE, current_env_file
from dispatcher.cli.output import say
from dispatcher.config import BUILT_IN, PREFIX, Origin, Settings, every_setting, examine, values
from dispatcher.config.plugins import prefix_of, provider_names
from dispatcher.domain.accounts import account_of
from dispatcher.errors import ConfigurationError

RUN_NEEDS: Final = ("database_url", "amqp_url", "providers")
API_NEEDS: Final = ("database_url", "amqp_url")
DEV_PREFIX: Final = f"{PREFIX}DEV_"
_TOOLS: Final = (f"{PREFIX}CACHE_DIR", VARIABLE, f"{PREFIX}API_URL", f"{PREFIX}API_KEY")
"""Variables that are not settings: of the development servers' cache, the option `--env-file`, examples for the API."""


def load_settings(*needs: str, reads_own: bool = False) -> Settings:
    """Like `read_settings`, but prints a warning on stderr for each variable that has no effect."""
    for warning in warnings(reads_own="providers" in needs):
        say(warning)
    return read_settings(*needs, reads_own=reads_own)


def read_settings(*needs: str, reads_own: bool = False) -> Settings:
    """The settings of this process; raises ConfigurationError with every mistake. The command requires the fields in
    `needs`. See `config.examine` for `reads_own`."""
    settings, _, mistakes = examine_settings(*needs, reads_own=reads_own)
    if mistakes:
        raise ConfigurationError(mistakes)
    return settings


def examine_settings(*needs: str, reads_own: bool = True) -> tuple[Settings, dict[str, Origin], tuple[str, ...]]:
    """As `config.examine`, but a value from the env file has the source `env-file`, and a mistake in the env file
    begins with the file and the line."""
    settings, origins, mistakes = examine(os.environ, needs=needs, reads_own=reads_own)
    if (file := current_env_file()) is None:
        return settings, origins, mistakes
    for name, origin in origins.items():
        if origin.source == "environment" and file.sets(origin.variable):
            origins[name] = replace(origin, source="env-file")
    return settings, origins, tuple(file.locate(mistakes))


def warnings(*, reads_own: bool = True) -> list[str]:
    """A warning for each variable that has no effect: it is not a setting, or the env file overrides it."""
    found = [
        f"warning: {name} is not a setting" + (f"; did you mean {closest}?" if closest else " and is ignored.")
        for name, closest in unknown_variables(os.environ, reads_own=reads_own).items()
    ]
    if file := current_env_file():
        found += [
            f"warning: {name} has a different value in the environment. The value in {file.path} is used."
            for name in file.overridden
        ]
    return found


def unknown_variables(environ: Mapping[str, str], *, reads_own: bool = True) -> dict[str, str | None]:
    """Variables that begin with DISPATCHER_ but are not settings, each with the most similar setting, if there is one.
    Unless `reads_own`, every name with the prefix of a built-in provider counts as known."""
    unknown = [name for name in sorted(environ) if name.startswith(PREFIX) and not name.startswith(DEV_PREFIX)]
    if not reads_own:
        theirs = tuple(map(prefix_of, BUILT_IN))
        unknown = [name for name in unknown if not name.startswith(theirs)]
    known: frozenset[str] = frozenset()
    listed = values.texts(environ.get(f"{PREFIX}PROVIDERS", "").lower())
    accounts = [name for name in listed if account_of(name)]
    # Loading providers is slow. So compare the names with the general settings first, then with the settings of the
    # built-in providers that they name, of all built-in providers, and of providers in installed packages.
    providers: tuple[Callable[[], Iterable[str]], ...] = (
        tuple,
        lambda: [each for each in BUILT_IN if any(name.startswith(prefix_of(each)) for name in unknown)],
        lambda: BUILT_IN,
        provider_names,
    )
    for names in providers:
        if unknown:
            known = known_variables((*names(), *accounts))
            unknown = [name for name in unknown if name not in known]
    return {name: _closest(name, known) for name in unknown}


def known_variables(providers: Iterable[str]) -> frozenset[str]:
    """Every variable that the dispatcher reads, including `_FILE` variables and the settings of the given providers."""
    settings = every_setting(providers)
    secrets = {f"{each.variable}_FILE" for each in settings if each.secret}
    return frozenset({each.variable for each in settings} | secrets | set(_TOOLS))


def _closest(name: str, known: Collection[str]) -> str | None:
    from difflib import get_close_matches

    # Compare the names without their common prefix, because the prefix would make all names similar.
    bare = [variable.removeprefix(PREFIX) for variable in sorted(known) if variable.startswith(PREFIX)]
    found = get_close_matches(name.removeprefix(PREFIX), bare, n=1, cutoff=0.6)
    return f"{PREFIX}{found[0]}" if found else None
