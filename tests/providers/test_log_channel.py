"""A package adds a third channel: examples/log_channel, installed by pip, sends through the conformance suite."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import orjson
import pytest

from dispatcher.config import load
from dispatcher.dev.conformance import TextConformance, a_text
from dispatcher.domain.outgoing import OutgoingEmail
from dispatcher.providers.contract import Provider

PACKAGE = Path(__file__).parents[2] / "examples" / "log_channel"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The module of the package, from a folder into which pip has installed it."""
    folder = tmp_path_factory.mktemp("packages")
    source = folder / "source"
    source.mkdir()
    for path in PACKAGE.iterdir():
        if path.is_file():
            (source / path.name).write_bytes(path.read_bytes())
    words = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([sys.executable, *words, "--target", folder / "there", source], check=True)
    sys.path.insert(0, str(folder / "there"))
    yield import_module("email_dispatcher_log")
    sys.path.remove(str(folder / "there"))
    del sys.modules["email_dispatcher_log"]


def a_line(**changes: Any) -> OutgoingEmail:
    return a_text(**{"to": ("orders",), "sender": "", "channel": "log", **changes})


@dataclass
class LogPlace:
    """The adapter and its folder."""

    provider: Provider
    folder: Path

    def _lines(self) -> list[dict[str, Any]]:
        return [orjson.loads(line) for path in self.folder.glob("*.log") for line in path.read_bytes().splitlines()]

    def times(self) -> Counter[str]:
        """How often each line was written."""
        return Counter(line["id"] for line in self._lines())

    def texts(self) -> list[str]:
        """The texts, in order."""
        return [line["text"] for line in self._lines()]


@asynccontextmanager
async def log_place(folder: Path) -> AsyncIterator[LogPlace]:
    module = sys.modules["email_dispatcher_log"]
    yield LogPlace(module.LogProvider(folder / "logs"), folder / "logs")


@pytest.mark.usefixtures("installed")
class TestLog(TextConformance, place=log_place):
    message = staticmethod(a_line)


def test_the_package_declares_the_provider(installed: Any) -> None:
    found = [point for each in distributions(path=[sys.path[0]]) for point in each.entry_points]

    assert [(point.group, point.name) for point in found] == [("email_dispatcher.providers", "log")]
    assert found[0].load() is installed.LogProvider


def test_its_message_is_stored_as_every_other(installed: Any) -> None:
    line = installed.LogLine(message_key="order-17", to="orders", text="Order 17 was paid.")
    other = installed.LogLine(message_key="order-17", to="orders", text="Order 18 was paid.")

    assert (line.channel, line.to, line.sender) == ("log", ("orders",), "")
    assert installed.LogLine.from_json(line.to_json()) == line
    assert line.payload_hash() != other.payload_hash()


def test_its_provider_is_configured_like_the_others(installed: Any, tmp_path: Path) -> None:
    from dispatcher.config import plugins

    plugins.installed.cache_clear()
    plugins.provider_class.cache_clear()
    try:
        settings = load({"DISPATCHER_PROVIDERS": "smtp,log", "DISPATCHER_LOG_DIR": str(tmp_path)})
        assert settings.providers == ("smtp", "log")
        assert installed.LogProvider.open(settings).capabilities.channel == "log"
    finally:
        plugins.installed.cache_clear()
        plugins.provider_class.cache_clear()
