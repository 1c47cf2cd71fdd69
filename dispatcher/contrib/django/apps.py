"""The Django app, which only has system checks: `INSTALLED_APPS = [..., "dispatcher.contrib.django"]`."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, Final

from django.apps import AppConfig
from django.conf import settings
from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.db import connections
from django.utils.module_loading import import_string

from dispatcher.contrib.django import EmailBackend
from dispatcher.domain.email import Email
from dispatcher.errors import InvalidEmail, SchemaError, StoreUnavailable
from dispatcher.store.callers import connection_of

_EXAMPLE: Final = "checks@example.com"


class DispatcherConfig(AppConfig):  # type: ignore[misc]  # Django has no types
    name = "dispatcher.contrib.django"
    label = "dispatcher"
    verbose_name = "Email dispatcher"

    def ready(self) -> None:
        checks.register(check_backends)
        checks.register(check_tables, checks.Tags.database)


def _backends() -> Iterator[EmailBackend]:
    """Our backends among those that the settings configure. Raises ImproperlyConfigured for a wrong option."""
    mailers = getattr(settings, "MAILERS", None)
    if mailers is None:
        mailers = {None: {"BACKEND": settings.EMAIL_BACKEND}}
    for alias, configured in mailers.items():
        kind = import_string(configured.get("BACKEND", "django.core.mail.backends.smtp.EmailBackend"))
        if issubclass(kind, EmailBackend):
            yield kind(alias=alias, **configured.get("OPTIONS", {}))


def check_backends(**_: Any) -> list[checks.CheckMessage]:
    try:
        return [message for backend in _backends() for message in _faults(backend)]
    except ImproperlyConfigured as error:
        return [checks.Error(str(error), id="dispatcher.E001")]


def _faults(backend: EmailBackend) -> Iterator[checks.CheckMessage]:
    if backend.database not in connections:
        hint = "Set the option `database` to an alias in DATABASES."
        yield checks.Error(f'DATABASES has no "{backend.database}".', hint=hint, id="dispatcher.E002")
    elif getattr(connections[backend.database].Database, "__name__", "") != "psycopg":
        hint = "Set ENGINE to django.db.backends.postgresql, and install psycopg 3 instead of psycopg2."
        text = f'The database "{backend.database}" is not PostgreSQL over psycopg 3.'
        yield checks.Error(text, hint=hint, id="dispatcher.E003")
    for setting in ("DEFAULT_FROM_EMAIL", "SERVER_EMAIL"):
        try:
            Email(message_key="checks", sender=getattr(settings, setting), to=_EXAMPLE, text="-", **backend.defaults)
        except InvalidEmail as error:
            name = setting if error.field == "sender" else f"The option {error.field} of the email backend"
            yield checks.Error(f"{name} {error.reason}.", id="dispatcher.E004")
    if settings.DEFAULT_FROM_EMAIL == "webmaster@localhost":
        hint = "Set it to an address of a domain that your provider may send for."
        yield checks.Warning("DEFAULT_FROM_EMAIL is not set.", hint=hint, id="dispatcher.W005")


def check_tables(databases: Collection[str] | None = None, **_: Any) -> list[checks.CheckMessage]:
    """Whether the databases have this release's tables. Only `migrate` and `check --database` run this check."""
    found: list[checks.CheckMessage] = []
    if any(message.level >= checks.ERROR for message in check_backends()):
        return found
    from dispatcher.store.migrations import verify_schema  # not needed to start an application

    for alias in sorted({backend.database for backend in _backends()} & set(databases or ())):
        connection = connections[alias]
        try:
            verify_schema(connection_of(connection))
        except SchemaError as error:
            text = f'The database "{alias}": {error.message}'
            found.append(checks.Warning(text, hint=error.remedy, id="dispatcher.W006"))
        except StoreUnavailable:
            continue  # the role may enqueue, but not read the record of migrations
    return found
