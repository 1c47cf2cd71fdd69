"""Takes a picture of every page: wide and narrow, light and dark, with realistic data.

    python -m tests.browser.screenshots FOLDER [PATH …]

The pictures show what the tests of every page check. PATH limits them to pages that begin with it, such as /captured.
"""

from __future__ import annotations

import itertools
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import psycopg

from dispatcher.dev.servers import Servers, private_servers
from dispatcher.store.connections import connected
from dispatcher.store.migrations import migrate
from tests.browser import chromium
from tests.browser.dataset import Ids, fill
from tests.browser.pages import PAGES
from tests.browser.stage import staged
from tests.browser.tab import Colors, Tab, Tabs

WIDTHS: Final = {"wide": 1280, "narrow": 320}
COLORS: Final[tuple[Colors, ...]] = ("light", "dark")


def main(folder: Path, chosen: tuple[str, ...]) -> None:
    """Takes the pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as name,
        private_servers(Path(name) / "servers", progress=print) as servers,
        staged(Path(name), servers, migrated(servers)) as stage,
        chromium.launched() as browser,
    ):
        ids = fill(stage, count=400)
        tabs = Tabs(browser, stage.url)
        take(tabs.open(), folder, ["/sign-in"], ids)
        tab = tabs.open()
        tab.sign_in(stage.operator)
        take(tab, folder, [path for path in PAGES if path.startswith(chosen)], ids)
        print(*tabs.close(), sep="\n")


def migrated(servers: Servers) -> str:
    """The name of a new database with tables."""
    name = "screenshots_template"
    with psycopg.connect(servers.database_url, autocommit=True) as administration:
        administration.execute(f"create database {name}".encode())
    with connected(urlsplit(servers.database_url)._replace(path=f"/{name}").geturl()) as connection:
        migrate(connection)
    return name


def take(tab: Tab, folder: Path, paths: Sequence[str], ids: Ids) -> None:
    """Takes the pictures of these pages."""
    for path, (word, width), colors in itertools.product(paths, WIDTHS.items(), COLORS):
        tab.show(colors, width)
        tab.go(path.format(**ids))
        tab.page.wait_for_load_state("networkidle")
        title = re.sub(r"[^a-z]+", "-", path).strip("-") or "overview"
        tab.page.screenshot(path=folder / f"{title}-{word}-{colors}.png", full_page=True)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), tuple(sys.argv[2:]) or ("/",))
