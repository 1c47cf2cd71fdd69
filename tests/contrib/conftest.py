"""Django in this process: a connection to the tables, without settings or apps of a project."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.contrib.django_project import database


@pytest.fixture
def django_connection(tables_url: str) -> Iterator[Any]:
    from django.apps import apps
    from django.conf import settings

    if not settings.configured:
        settings.configure()
    apps.populate([])
    from django.db import connections

    before = connections.settings
    connections.settings = connections.configure_settings({"default": database(tables_url)})
    yield connections["default"]
    connections["default"].close()
    del connections["default"]
    connections.settings = before
