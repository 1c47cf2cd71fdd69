"""Providers that installed packages bring: used as ours are, or refused with the reason."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from dispatcher.config import examine, load, plugins
from dispatcher.dev.conformance import Conformance
from dispatcher.providers.capabilities import uncarried
from dispatcher.providers.contract import Provider
from dispatcher.providers.registry import check_provider, most_at_once, open_provider
from dispatcher.telemetry.meters import Meter
from tests.cli.commandline import CommandLine
from tests.providers import log_package
from tests.providers.emails import an_email

NAMED = {"DISPATCHER_PROVIDERS": "log"}


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Nobody remembers which packages were there before, or will afterwards."""
    monkeypatch.syspath_prepend(tmp_path)
    declared = list(Meter.declared)
    _forget()
    yield
    Meter.declared[:] = declared
    _forget()


def _forget() -> None:
    plugins.installed.cache_clear()
    plugins.provider_class.cache_clear()
    for name in [name for name in sys.modules if name.startswith("email_dispatcher_")]:
        del sys.modules[name]


def mistake(environ: dict[str, str] | None = None) -> str:
    """The one mistake of an environment that names the provider."""
    (found,) = examine({**NAMED, **(environ or {})}, needs=["providers"])[2]
    return found


def test_its_settings_are_read_as_ours_are_and_its_name_is_known(tmp_path: Path) -> None:
    log_package.install(tmp_path)
    (tmp_path / "token").write_text("t0ken\n")

    settings = load({**NAMED, "DISPATCHER_LOG_FILE": "/tmp/log", "DISPATCHER_LOG_TOKEN_FILE": str(tmp_path / "token")})

    own = settings.own["log"]
    assert (getattr(own, "file"), getattr(own, "token")) == (Path("/tmp/log"), "t0ken")  # noqa: B009
    assert "t0ken" not in repr(settings)
    assert most_at_once("log", settings) == settings.prefetch
    assert load({**NAMED, "DISPATCHER_LOG_MAX_PER_SECOND": "5"}).ceiling_of("log") == 5


async def test_it_sends_and_counts(tmp_path: Path) -> None:
    log_package.install(tmp_path)
    settings = load({**NAMED, "DISPATCHER_LOG_FILE": str(tmp_path / "lines")})

    assert await check_provider("log", settings) == f"{tmp_path / 'lines'} gets a line per email."
    assert open_provider("log", settings).capabilities.copies == 1
    assert Meter.declared[-1].name == "dispatcher_log_lines_total"


def test_what_it_needs_is_told_as_for_ours(tmp_path: Path) -> None:
    log_package.install(tmp_path)

    assert mistake() == "DISPATCHER_LOG_FILE is not set, but DISPATCHER_PROVIDERS names log: set a file."


def test_nobody_is_advised_to_use_one_that_delivers_to_nobody(tmp_path: Path) -> None:
    log_package.install(tmp_path)

    configured = {"log": plugins.provider_class("log").capabilities}

    why = uncarried(an_email(template_id="d-1", text=None), configured)
    assert why is not None
    assert "(sendgrid, ses); configured: log." in why.message


def test_a_name_that_nobody_brings_is_told_with_those_that_are_there(tmp_path: Path) -> None:
    log_package.install(tmp_path)

    assert "does not know pigeon; known are: capture, sendgrid, ses, smtp, log." in mistake(
        {"DISPATCHER_PROVIDERS": "pigeon"}
    )


@pytest.mark.parametrize(
    ("code", "target", "words"),
    [
        ("import no_such_module", "LogProvider", "cannot be loaded (ModuleNotFoundError: No module named"),
        ("", "LogProvider", "cannot be loaded (AttributeError"),
        ("LogProvider = 7", "LogProvider", "does not fit the contract of providers: it is no class."),
        (
            "class LogProvider:\n    name = 'other'\n    def send(self): ...\n",
            "LogProvider",
            (
                "does not fit the contract of providers: its `name` is not 'log'; its `capabilities` are no "
                "dispatcher.domain.capabilities.Capabilities; its `settings` are no subclass of "
                "dispatcher.config.ProviderSettings; it has no method `open`; it has no method `check`; it has no "
                "method `close`. Install a release of it for this Email Dispatcher"
            ),
        ),
        (
            log_package.CODE.replace("        token:", "        level:"),
            "LogProvider",
            "its settings have variables of ours: DISPATCHER_LOG_LEVEL",
        ),
    ],
    ids=["import", "attribute", "no class", "contract", "variable"],
)
def test_a_package_that_cannot_be_used_is_refused_with_the_reason(
    tmp_path: Path, code: str, target: str, words: str
) -> None:
    log_package.install(tmp_path, code=code, target=target)

    found = mistake()

    assert found.startswith(
        f"DISPATCHER_PROVIDERS names log, which email-dispatcher-log 1.0 brings, but email_dispatcher_log:{target} "
    )
    assert words.rstrip(".") in found
    assert "take log out" in found


def test_a_package_that_takes_the_name_of_one_of_ours_is_refused(tmp_path: Path) -> None:
    log_package.install(tmp_path, name="capture")

    found = mistake({"DISPATCHER_PROVIDERS": "capture", "DISPATCHER_CAPTURE_DIR": str(tmp_path)})

    assert found.startswith(
        "DISPATCHER_PROVIDERS names capture, which is a built-in provider, but email-dispatcher-capture 1.0 brings"
    )


def test_two_packages_with_one_name_are_refused(tmp_path: Path) -> None:
    log_package.install(tmp_path)
    other = tmp_path / "email_dispatcher_other-2.0.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: email-dispatcher-other\nVersion: 2.0\n")
    (other / "entry_points.txt").write_text("[email_dispatcher.providers]\nlog = x:Y\n")

    assert "which several packages bring: email-dispatcher-log 1.0, email-dispatcher-other 2.0" in mistake()


def test_the_command_line_shows_it_and_masks_its_secret(tmp_path: Path) -> None:
    log_package.install(tmp_path)
    environment = {"DISPATCHER_LOG_FILE": "/tmp/log", "DISPATCHER_LOG_TOKEN": "t0ken", "PYTHONPATH": str(tmp_path)}
    commandline = CommandLine(tmp_path, NAMED | environment)

    shown = {line["variable"]: line["value"] for line in commandline("config", "--json").json["settings"]}
    assert (shown["DISPATCHER_LOG_FILE"], shown["DISPATCHER_LOG_TOKEN"]) == ("/tmp/log", "***")
    ended = commandline("doctor", "--json")
    assert "package email-dispatcher-log 1.0" in ended.stdout
    assert "DISPATCHER_LOG_FILE is no setting" not in ended.stderr


@dataclass(frozen=True, slots=True)
class LogPlace:
    """The log provider and its file."""

    provider: Provider
    file: Path

    def times(self) -> Counter[str]:
        """How often each email id arrived."""
        return Counter(self.file.read_text().split() if self.file.exists() else ())


@asynccontextmanager
async def log_place(folder: Path) -> AsyncIterator[LogPlace]:
    """The log provider, from a package."""
    log_package.install(folder)
    settings = load({**NAMED, "DISPATCHER_LOG_FILE": str(folder / "lines")})
    yield LogPlace(open_provider("log", settings), folder / "lines")


class TestLog(Conformance, place=log_place): ...
