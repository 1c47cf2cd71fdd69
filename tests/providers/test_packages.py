"""Providers from installed packages are used like built-in ones, or refused with a reason."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from dispatcher.cli.checks import CheckState, check_packages
from dispatcher.config import BUILT_IN, examine, load, plugins
from dispatcher.dev.conformance import Conformance
from dispatcher.providers.capabilities import capability_gap
from dispatcher.providers.contract import Provider
from dispatcher.providers.registry import check_provider, max_in_flight, open_provider
from dispatcher.telemetry.meters import Meter
from tests.cli.commandline import CommandLine
from tests.providers import journal_package
from tests.providers.emails import an_email

NAMED = {"DISPATCHER_PROVIDERS": "journal"}


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Clear the cache of found packages before and after the test."""
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
    """The configuration error, which must be the only one, if DISPATCHER_PROVIDERS contains the provider."""
    (found,) = examine({**NAMED, **(environ or {})}, needs=["providers"])[2]
    return found


def test_a_packages_provider_has_settings_and_a_name(tmp_path: Path) -> None:
    journal_package.install(tmp_path)
    (tmp_path / "token").write_text("t0ken\n")

    settings = load(
        {**NAMED, "DISPATCHER_JOURNAL_FILE": "/tmp/log", "DISPATCHER_JOURNAL_TOKEN_FILE": str(tmp_path / "token")}
    )

    own = settings.own["journal"]
    assert (getattr(own, "file"), getattr(own, "token")) == (Path("/tmp/log"), "t0ken")  # noqa: B009
    assert "t0ken" not in repr(settings)
    assert max_in_flight("journal", settings) == settings.prefetch
    assert load({**NAMED, "DISPATCHER_JOURNAL_MAX_PER_SECOND": "5"}).ceiling_of("journal") == 5


async def test_a_packages_provider_sends_and_counts(tmp_path: Path) -> None:
    journal_package.install(tmp_path)
    settings = load({**NAMED, "DISPATCHER_JOURNAL_FILE": str(tmp_path / "lines")})

    assert await check_provider("journal", settings) == f"{tmp_path / 'lines'} gets a line per email."
    assert open_provider("journal", settings).capabilities.copies == 1
    assert Meter.declared[-1].name == "dispatcher_journal_lines_total"


def test_a_missing_setting_of_a_packages_provider_is_reported(tmp_path: Path) -> None:
    journal_package.install(tmp_path)

    assert mistake() == "DISPATCHER_JOURNAL_FILE is not set, but DISPATCHER_PROVIDERS lists journal: set a file."


def test_a_provider_that_delivers_nothing_is_not_recommended(tmp_path: Path) -> None:
    journal_package.install(tmp_path)

    configured = {"journal": plugins.provider_class("journal").capabilities}

    why = capability_gap(an_email(template_id="d-1", text=None), configured)
    assert why is not None
    assert "(resend, sendgrid, ses); configured: journal." in why.message


def test_an_unknown_provider_name_is_reported_with_the_known_names(tmp_path: Path) -> None:
    journal_package.install(tmp_path)

    assert f"has an unknown provider: 'pigeon'. Choose from: {', '.join(BUILT_IN)}, journal." in mistake(
        {"DISPATCHER_PROVIDERS": "pigeon"}
    )


@pytest.mark.parametrize(
    ("code", "target", "words"),
    [
        ("import no_such_module", "JournalProvider", "cannot be loaded (ModuleNotFoundError: No module named"),
        ("", "JournalProvider", "cannot be loaded (AttributeError"),
        ("JournalProvider = 7", "JournalProvider", "does not follow the provider contract: it is not a class."),
        (
            "class JournalProvider:\n    name = 'other'\n    def send(self): ...\n",
            "JournalProvider",
            (
                "does not follow the provider contract: its `name` is not 'journal'; its `capabilities` are not a "
                "dispatcher.domain.capabilities.Capabilities; its `settings` are not a subclass of "
                "dispatcher.config.ProviderSettings; it has no method `open`; it has no method `check`; it has no "
                "method `close`. Install a release of that package that supports this version"
            ),
        ),
    ],
    ids=["import", "attribute", "no class", "contract"],
)
def test_a_package_that_cannot_be_used_is_refused_with_the_reason(
    tmp_path: Path, code: str, target: str, words: str
) -> None:
    journal_package.install(tmp_path, code=code, target=target)

    found = mistake()

    source = "DISPATCHER_PROVIDERS lists journal, which email-dispatcher-journal 1.0 provides, but"
    assert found.startswith(f"{source} email_dispatcher_journal:{target} ")
    assert words.rstrip(".") in found
    assert "remove journal" in found


def test_a_package_with_a_variable_of_a_built_in_setting_is_refused(tmp_path: Path) -> None:
    code = journal_package.CODE.replace('name = "journal"', 'name = "alert"').replace("    token:", "    email_to:")
    journal_package.install(tmp_path, name="alert", code=code)

    assert "its settings use variables of the dispatcher: DISPATCHER_ALERT_EMAIL_TO" in mistake(
        {"DISPATCHER_PROVIDERS": "alert"}
    )


def test_a_package_with_the_name_of_a_built_in_provider_is_refused(tmp_path: Path) -> None:
    journal_package.install(tmp_path, name="capture")

    found = mistake({"DISPATCHER_PROVIDERS": "capture", "DISPATCHER_CAPTURE_DIR": str(tmp_path)})

    assert found.startswith(
        "DISPATCHER_PROVIDERS: capture is a built-in provider, but email-dispatcher-capture 1.0 provides a second"
    )


def test_doctor_warns_of_a_package_with_the_name_of_a_built_in_provider(tmp_path: Path) -> None:
    journal_package.install(tmp_path, name="capture")

    (found,) = check_packages()

    assert found.state is CheckState.WARNING
    assert found.detail.startswith(
        "if DISPATCHER_PROVIDERS includes capture, `dispatcher run` fails: capture is a built-in provider, but"
    )


def test_two_packages_with_one_name_are_refused(tmp_path: Path) -> None:
    journal_package.install(tmp_path)
    other = tmp_path / "email_dispatcher_other-2.0.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: email-dispatcher-other\nVersion: 2.0\n")
    (other / "entry_points.txt").write_text("[email_dispatcher.providers]\njournal = x:Y\n")

    assert "which several packages provide: email-dispatcher-journal 1.0, email-dispatcher-other 2.0" in mistake()


def test_the_command_line_shows_the_provider_and_masks_its_secret(tmp_path: Path) -> None:
    journal_package.install(tmp_path)
    environment = {
        "DISPATCHER_JOURNAL_FILE": "/tmp/log",
        "DISPATCHER_JOURNAL_TOKEN": "t0ken",
        "PYTHONPATH": str(tmp_path),
    }
    commandline = CommandLine(tmp_path, NAMED | environment)

    shown = {line["variable"]: line["value"] for line in commandline("config", "--json").json["settings"]}
    assert (shown["DISPATCHER_JOURNAL_FILE"], shown["DISPATCHER_JOURNAL_TOKEN"]) == ("/tmp/log", "***")
    ended = commandline("doctor", "--json")
    assert "package email-dispatcher-journal 1.0" in ended.stdout
    assert "DISPATCHER_JOURNAL_FILE is no setting" not in ended.stderr


@dataclass(frozen=True, slots=True)
class JournalPlace:
    """The journal provider and the file into which it writes."""

    provider: Provider
    file: Path

    def times(self) -> Counter[str]:
        """How often each email id arrived."""
        return Counter(self.file.read_text().split() if self.file.exists() else ())


@asynccontextmanager
async def journal_place(folder: Path) -> AsyncIterator[JournalPlace]:
    """Install the journal provider from a package, and create its adapter."""
    journal_package.install(folder)
    settings = load({**NAMED, "DISPATCHER_JOURNAL_FILE": str(folder / "lines")})
    yield JournalPlace(open_provider("journal", settings), folder / "lines")


class TestJournal(Conformance, place=journal_place): ...
