"""Which providers there are: the modules of dispatcher/providers, and those that installed packages bring.

A package brings one by an entry point of the group `email_dispatcher.providers`: its name is the provider's word in
DISPATCHER_PROVIDERS, and it names a class that follows `providers.contract.ProviderClass`. Modules are found by name
and loaded only here; nothing else of this room knows them. docs/providers.md says how to write one.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from dispatcher.config.setting import PREFIX, Setting, settings_in
from dispatcher.config.settings import BUILT_IN, ProviderSettings, Settings

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP: Final = "email_dispatcher.providers"
_VARIABLES: Final = frozenset(each.variable for each in settings_in(Settings))
_METHODS: Final = ("open", "send", "check", "close")


@cache
def installed() -> Mapping[str, tuple[EntryPoint, ...]]:
    """The entry points of installed packages, by the provider's name; two packages may bring the same one."""
    from importlib.metadata import entry_points  # 20 ms: few commands ask

    found: dict[str, tuple[EntryPoint, ...]] = {}
    for point in entry_points(group=GROUP):
        found[point.name] = (*found.get(point.name, ()), point)
    return MappingProxyType(found)


def provider_names() -> tuple[str, ...]:
    """Every provider that DISPATCHER_PROVIDERS may name."""
    return (*BUILT_IN, *sorted(installed().keys() - set(BUILT_IN)))


def verify_name(name: str) -> None:
    """Raises ValueError as `provider_class` does where there is no such provider; loads nothing."""
    if name not in BUILT_IN and name not in installed():
        # A text that cannot be a name, such as a URL with a password, is not repeated.
        named = name if name.isidentifier() or name.replace("-", "").isalnum() else "what is no name"
        raise ValueError(f"does not know {named}; known are: {', '.join(provider_names())}")


@cache
def provider_class(name: str) -> Any:
    """The class of a provider; any, because a package's may lack something: see `contract.ProviderClass`.

    Raises:
        ValueError: it is unknown, cannot be loaded, or does not fit; the rest of a sentence with reason and remedy.
    """
    if name in BUILT_IN:
        return import_module(f"dispatcher.providers.{name}").PROVIDER
    verify_name(name)
    point, *others = installed()[name]
    if others:
        raise ValueError(f"names {name}, which several packages bring: {packages_of(name)}. Uninstall all but one")
    brought = f"names {name}, which {packages_of(name)} brings, but"
    try:
        found = point.load()
    except Exception as error:  # a package's code may raise anything
        words = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"{brought} {point.value} cannot be loaded ({words}). Install what it needs, or take {name} out"
        ) from error
    if misfits := _misfits(name, found):
        raise ValueError(
            f"{brought} {point.value} does not fit the contract of providers: {'; '.join(misfits)}. "
            f"Install a release of it for this Email Dispatcher, or take {name} out"
        )
    return found


def packages_of(name: str) -> str:
    """Which packages bring a provider, with their versions."""
    points = installed()[name]
    return ", ".join(sorted(f"{one.dist.name} {one.dist.version}" if one.dist else one.value for one in points))


def clash(name: str) -> str | None:
    """The mistake where an installed package brings a provider with the name of one of ours; None if none does."""
    if name not in BUILT_IN or name not in installed():
        return None
    return (
        f"DISPATCHER_PROVIDERS names {name}, which is a built-in provider, but {packages_of(name)} brings another one "
        "of that name. Uninstall that package, or have it named differently."
    )


def own_settings(name: str) -> tuple[Setting, ...]:
    """The settings that a provider declares; raises ValueError as `provider_class` does."""
    return settings_in(provider_class(name).settings, prefix_of(name))


def prefix_of(name: str) -> str:
    """What the variables of a provider's settings begin with."""
    return f"{PREFIX}{name.replace('-', '_').upper()}_"


def _misfits(name: str, found: Any) -> list[str]:
    """What a package's class lacks."""
    from dispatcher.domain.capabilities import Capabilities  # few commands look at emails

    if not isinstance(found, type):
        return ["it is no class"]
    faults = [] if getattr(found, "name", None) == name else [f"its `name` is not {name!r}"]
    if not isinstance(getattr(found, "capabilities", None), Capabilities):
        faults.append("its `capabilities` are no dispatcher.domain.capabilities.Capabilities")
    kind = getattr(found, "settings", None)
    if not (isinstance(kind, type) and issubclass(kind, ProviderSettings)):
        faults.append("its `settings` are no subclass of dispatcher.config.ProviderSettings")
    elif taken := {each.variable for each in settings_in(kind, prefix_of(name))} & _VARIABLES:
        faults.append(f"its settings have variables of ours: {', '.join(sorted(taken))}")
    return faults + [f"it has no method `{each}`" for each in _METHODS if not callable(getattr(found, each, None))]
