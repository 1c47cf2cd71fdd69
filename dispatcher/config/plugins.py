"""Finds and loads providers: the modules in dispatcher/providers, and providers from installed packages.

A package declares a provider by an entry point in the group `email_dispatcher.providers`. The entry point's name is the
provider's name in DISPATCHER_PROVIDERS, and its object is a class that follows `providers.contract.ProviderClass`. Only
this module of `config` imports providers. docs/providers.md explains how to write one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from dispatcher.config.setting import PREFIX, Setting, settings_in
from dispatcher.config.settings import BUILT_IN, EVENTS_FIELDS, SMS_PROVIDERS, ProviderSettings, Settings
from dispatcher.domain.accounts import ACCOUNT, MAX_NAME_OCTETS, SEPARATOR, account_of, provider_of

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP: Final = "email_dispatcher.providers"
_VARIABLES: Final = frozenset(each.variable for each in settings_in(Settings))
_METHODS: Final = ("open", "send", "check", "close")


@cache
def installed() -> Mapping[str, tuple[EntryPoint, ...]]:
    """The entry points of installed packages, by the provider's name. Several packages can declare the same name."""
    from importlib.metadata import entry_points  # imported late: the import takes 20 ms, and few commands need it

    found: dict[str, tuple[EntryPoint, ...]] = {}
    for point in entry_points(group=GROUP):
        found[point.name] = (*found.get(point.name, ()), point)
    return MappingProxyType(found)


def provider_names() -> tuple[str, ...]:
    """Every provider that DISPATCHER_PROVIDERS may list."""
    return (*BUILT_IN, *sorted(installed().keys() - set(BUILT_IN)))


def verify_name(name: str) -> None:
    """Raises ValueError, as `provider_class`, if there is no such provider, or it can have no such account. Does not
    load the provider's code."""
    provider, separator, account = name.partition(SEPARATOR)
    if provider not in BUILT_IN and provider not in installed():
        # A text that cannot be a name may be a secret, such as a URL with a password, so the error does not repeat it.
        is_name = provider.isidentifier() or provider.replace("-", "").isalnum()
        named = repr(provider) if is_name and ACCOUNT.fullmatch(account or "a") else "a text that is not a name"
        raise ValueError(f"has an unknown provider: {named}. Choose from: {', '.join(provider_names())}")
    if separator and provider in SMS_PROVIDERS:
        raise ValueError(f"has an account of {provider}, but only providers of email have several accounts")
    if separator and not (ACCOUNT.fullmatch(account) and len(name) <= MAX_NAME_OCTETS):
        raise ValueError(
            f"has an account of {provider} whose name is not valid: use a lower-case letter, then lower-case letters, "
            f"digits or _, at most {MAX_NAME_OCTETS - len(provider) - 1} in all, such as {provider}{SEPARATOR}billing"
        )


@cache
def provider_class(name: str) -> Any:
    """The class of a provider. It is typed Any, because a package's class might not follow `contract.ProviderClass`.

    Raises ValueError if the provider is unknown, cannot be loaded, or does not follow the contract. The message follows
    the variable's name, and includes the remedy.
    """
    if SEPARATOR in name:
        verify_name(name)
        return provider_class(provider_of(name))
    if name in BUILT_IN:
        return import_module(f"dispatcher.providers.{name.replace('-', '_')}").PROVIDER
    verify_name(name)
    point, *others = installed()[name]
    if others:
        raise ValueError(
            f"lists {name}, which several packages provide: {packages_of(name)}. Uninstall all but one of them"
        )
    source = f"lists {name}, which {packages_of(name)} provides, but"
    try:
        found = point.load()
    except Exception as error:  # a package's code may raise anything
        words = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"{source} {point.value} cannot be loaded ({words}). Install the packages that {name} needs, or remove "
            f"{name}"
        ) from error
    if misfits := _misfits(name, found):
        raise ValueError(
            f"{source} {point.value} does not follow the provider contract: {'; '.join(misfits)}. "
            f"Install a release of that package that supports this version of Email Dispatcher, or remove {name}"
        )
    return found


def packages_of(name: str) -> str:
    """The packages that declare a provider, with their versions."""
    points = installed()[name]
    return ", ".join(sorted(f"{one.dist.name} {one.dist.version}" if one.dist else one.value for one in points))


def clash(name: str) -> str | None:
    """The error message if an installed package declares a provider with a built-in provider's name; otherwise None."""
    name = provider_of(name)
    if name not in BUILT_IN or name not in installed():
        return None
    return (
        f"{name} is a built-in provider, but {packages_of(name)} provides a second provider with that name. "
        "Uninstall that package, or rename its provider."
    )


def own_settings(name: str) -> tuple[Setting, ...]:
    """The settings that a provider or an account declares. Raises the same errors as `provider_class`."""
    return settings_in(provider_class(name).settings, prefix_of(name), account_of(name))


def events_settings(name: str) -> list[Setting]:
    """The setting with which an account's events are verified, if there is one. That of a provider is general."""
    field = EVENTS_FIELDS.get(provider_of(name)) if account_of(name) else None
    its, own = prefix_of(provider_of(name)), prefix_of(name)
    return [
        each._replace(variable=own + each.variable.removeprefix(its))
        for each in (settings_in(Settings) if field else ())
        if each.name == field
    ]


def renamed(text: str, name: str) -> str:
    """The text with the variables of an account in place of the provider's."""
    if SEPARATOR not in name:
        return text
    for its, own in zip(own_settings(provider_of(name)), own_settings(name), strict=True):
        text = re.sub(rf"\b{its.variable}\b", own.variable, text)
    return text


def prefix_of(name: str) -> str:
    """The prefix of the variables for a provider's settings, such as `DISPATCHER_SENDGRID_`; for an account,
    `DISPATCHER_SENDGRID_ACME_`."""
    return f"{PREFIX}{name.replace('-', '_').replace(SEPARATOR, '_').upper()}_"


def _misfits(name: str, found: Any) -> list[str]:
    """How a package's class violates the provider contract: clauses for an error, such as `it is not a class`."""
    from dispatcher.domain.capabilities import Capabilities  # loaded late, because few commands need it

    if not isinstance(found, type):
        return ["it is not a class"]
    faults = [] if getattr(found, "name", None) == name else [f"its `name` is not {name!r}"]
    if not isinstance(getattr(found, "capabilities", None), Capabilities):
        faults.append("its `capabilities` are not a dispatcher.domain.capabilities.Capabilities")
    kind = getattr(found, "settings", None)
    if not (isinstance(kind, type) and issubclass(kind, ProviderSettings)):
        faults.append("its `settings` are not a subclass of dispatcher.config.ProviderSettings")
    elif taken := {each.variable for each in settings_in(kind, prefix_of(name))} & _VARIABLES:
        faults.append(f"its settings use variables of the dispatcher: {', '.join(sorted(taken))}")
    return faults + [f"it has no method `{each}`" for each in _METHODS if not callable(getattr(found, each, None))]
