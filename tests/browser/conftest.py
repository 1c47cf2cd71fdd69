"""Fixtures: a browser and a stage for each module, and tabs whose consoles must stay empty.

Playwright runs an event loop in the tests' thread until the module ends, so these modules have no asynchronous tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser

from dispatcher.dev.servers import Servers
from tests.browser import chromium
from tests.browser.stage import Stage, staged
from tests.browser.tab import Tab, Tabs


@pytest.fixture(scope="module")
def stage(servers: Servers, template_database: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with staged(tmp_path_factory.mktemp("stage"), servers, template_database) as opened:
        yield opened


@pytest.fixture(scope="module")
def browser(stage: Stage) -> Iterator[Browser]:
    """The browser. The stage is there before, because it uses an event loop of its own."""
    with chromium.launched() as opened:
        yield opened


@pytest.fixture(scope="module")
def signed_in(browser: Browser, stage: Stage) -> Any:
    tabs = Tabs(browser, stage.url)
    tab = tabs.open()
    tab.sign_in(stage.operator)
    cookies = tab.page.context.storage_state()
    assert not tabs.close()
    return cookies


@pytest.fixture
def tabs(browser: Browser, stage: Stage) -> Iterator[Tabs]:
    """Opens tabs. At the end of the test, no console may have an error."""
    opened = Tabs(browser, stage.url)
    yield opened
    assert not opened.close()


@pytest.fixture
def tab(tabs: Tabs, signed_in: Any) -> Tab:
    return tabs.open(signed_in)
