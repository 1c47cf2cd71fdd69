"""The settings as a command gets them: from the environment, with a word about variables that nobody reads."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Final

from dispatcher.cli.output import say
from dispatcher.config import PREFIX, Settings, load, variable_of

DEV_PREFIX: Final = f"{PREFIX}DEV_"
_TOOLS: Final = (f"{PREFIX}CACHE_DIR", f"{PREFIX}LOG_DIR")
"""Read by others: the dev tools, which run before there are settings, and deploy/supervisord.conf."""


def load_settings(*needs: str) -> Settings:
    """The settings of this process; says on stderr which `DISPATCHER_` variables nobody reads.

    Args:
        needs: Fields that must be set, because the command cannot work without them.

    Raises:
        ConfigurationError: with every mistake at once.
    """
    for warning in unknown_warnings(os.environ):
        say(warning)
    return load(os.environ, needs=needs)


def unknown_variables(environ: Mapping[str, str]) -> dict[str, str | None]:
    """Variables that carry our prefix and that nobody reads; the value is the closest known name, if one is close."""
    known = known_variables()
    unknown = [name for name in sorted(environ) if name.startswith(PREFIX) and name not in known]
    return {name: _closest(name, known) for name in unknown if not name.startswith(DEV_PREFIX)}


def unknown_warnings(environ: Mapping[str, str]) -> list[str]:
    """A sentence for each variable that nobody reads."""
    return [
        f"warning: {name} is no setting" + (f"; did you mean {closest}?" if closest else " and is ignored.")
        for name, closest in unknown_variables(environ).items()
    ]


def known_variables() -> frozenset[str]:
    """Every variable that is read, those of the dev tools included."""
    settings = {variable_of(item) for item in fields(Settings)}
    secrets = {f"{variable_of(item)}_FILE" for item in fields(Settings) if item.metadata["secret"]}
    return frozenset(settings | secrets | set(_TOOLS))


def _closest(name: str, known: Collection[str]) -> str | None:
    from difflib import get_close_matches

    # Without the prefix, which all of them share and which would make everything look close.
    bare = [variable.removeprefix(PREFIX) for variable in sorted(known) if variable.startswith(PREFIX)]
    found = get_close_matches(name.removeprefix(PREFIX), bare, n=1, cutoff=0.6)
    return f"{PREFIX}{found[0]}" if found else None
