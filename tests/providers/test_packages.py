"""Providers from installed packages are used like built-in ones, or refused with a reason; one adds a channel."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from textwrap import dedent
from typing import Any, Final

import orjson
import pytest

from dispatcher.cli.checks import CheckState, check_packages
from dispatcher.config import BUILT_IN, examine, load, plugins
from dispatcher.dev.conformance import TextConformance, a_text
from dispatcher.domain.outgoing import OutgoingEmail
from dispatcher.providers.capabilities import capability_gap
from dispatcher.providers.contract import Provider
from dispatcher.providers.registry import check_provider, max_in_flight, open_provider
from dispatcher.telemetry.meters import Meter
from tests.cli.commandline import CommandLine
from tests.providers.emails import an_email

NAMED = {"DISPATCHER_PROVIDERS": "journal"}
LOG = "email_dispatcher_log"
CODE: Final = """
    from dataclasses import dataclass
    from pathlib import Path

    from dispatcher.config import ProviderSettings, setting, values
    from dispatcher.domain.capabilities import Capabilities
    from dispatcher.telemetry.meters import Counter, Panel

    LINES = Counter("dispatcher_journal_lines_total", "Lines that the journal provider wrote.", panel=Panel.SENDING)


    @dataclass(frozen=True, slots=True, kw_only=True)
    class JournalSettings(ProviderSettings):
        file: Path | None = setting(values.path_of, None, "File that gets a line per email.", needed="set a file")
        token: str = setting(values.api_key, None, "What each line begins with.", secret=True, empty="")


    class JournalProvider:
        name = "journal"
        capabilities = Capabilities(copies=1, delivers=False)
        settings = JournalSettings

        def __init__(self, file):
            self._file = file

        @classmethod
        def open(cls, settings):
            return cls(settings.of(JournalSettings).file)

        async def send(self, email, attempt):
            raise NotImplementedError

        async def check(self):
            return f"{self._file} gets a line per email."

        async def close(self):
            pass
"""


def install(folder: Path, *, name: str = "journal", code: str = CODE, provides: str = "") -> None:
    """Write the package into a folder for sys.path."""
    info = folder / f"email_dispatcher_{name}-1.0.dist-info"
    info.mkdir(parents=True)
    module = f"email_dispatcher_{name}"
    (folder / f"{module}.py").write_text(dedent(code))
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: email-dispatcher-{name}\nVersion: 1.0\n")
    entry = f"{provides or name} = {module}:JournalProvider"
    (info / "entry_points.txt").write_text(f"[email_dispatcher.providers]\n{entry}\n")


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.syspath_prepend(tmp_path)
    declared = list(Meter.declared)
    _forget()
    yield
    Meter.declared[:] = declared
    _forget()


def _forget() -> None:
    plugins.installed.cache_clear()
    plugins.provider_class.cache_clear()
    for name in [name for name in sys.modules if name.startswith("email_dispatcher_") and name != LOG]:
        del sys.modules[name]


def mistake(environ: dict[str, str] | None = None) -> str:
    """The configuration error, which must be the only one, if DISPATCHER_PROVIDERS contains the provider."""
    (found,) = examine({**NAMED, **(environ or {})}, needs=["providers"])[2]
    return found


def test_a_packages_provider_has_settings_and_a_name(tmp_path: Path) -> None:
    install(tmp_path)
    (tmp_path / "token").write_text("t0ken\n")

    settings = load(
        {**NAMED, "DISPATCHER_JOURNAL_FILE": "/tmp/log", "DISPATCHER_JOURNAL_TOKEN_FILE": str(tmp_path / "token")}
    )

    own = settings.own["journal"]
    assert (getattr(own, "file"), getattr(own, "token")) == (Path("/tmp/log"), "t0ken")  # noqa: B009
    assert "t0ken" not in repr(settings)
    assert max_in_flight("journal", settings) == settings.prefetch
    assert load({**NAMED, "DISPATCHER_JOURNAL_MAX_PER_SECOND": "5"}).ceiling_of("journal") == 5


async def test_a_packages_provider_is_checked_counts_and_is_not_recommended_if_it_delivers_nothing(
    tmp_path: Path,
) -> None:
    install(tmp_path)
    settings = load({**NAMED, "DISPATCHER_JOURNAL_FILE": str(tmp_path / "lines")})

    assert await check_provider("journal", settings) == f"{tmp_path / 'lines'} gets a line per email."
    assert Meter.declared[-1].name == "dispatcher_journal_lines_total"
    configured = {"journal": open_provider("journal", settings).capabilities}
    why = capability_gap(an_email(template_id="d-1", text=None), configured)
    assert why is not None
    assert "(resend, sendgrid, ses); configured: journal." in why.message


def test_a_missing_setting_or_an_unknown_provider_is_reported(tmp_path: Path) -> None:
    install(tmp_path)

    assert mistake() == "DISPATCHER_JOURNAL_FILE is not set, but DISPATCHER_PROVIDERS lists journal: set a file."
    unknown = mistake({"DISPATCHER_PROVIDERS": "pigeon"})
    assert f"has an unknown provider: 'pigeon'. Choose from: {', '.join(BUILT_IN)}, journal." in unknown


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import no_such_module", "cannot be loaded (ModuleNotFoundError: No module named"),
        ("", "cannot be loaded (AttributeError"),
        ("JournalProvider = 7", "does not follow the provider contract: it is not a class."),
        (
            "class JournalProvider:\n    name = 'other'\n    def send(self): ...\n",
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
def test_a_package_that_cannot_be_used_is_refused_with_the_reason(tmp_path: Path, code: str, words: str) -> None:
    install(tmp_path, code=code)

    found = mistake()

    source = "DISPATCHER_PROVIDERS lists journal, which email-dispatcher-journal 1.0 provides, but"
    assert found.startswith(f"{source} email_dispatcher_journal:JournalProvider ")
    assert words.rstrip(".") in found
    assert "remove journal" in found


def test_a_package_with_a_variable_of_a_built_in_setting_is_refused(tmp_path: Path) -> None:
    code = CODE.replace('name = "journal"', 'name = "alert"').replace("    token:", "    email_to:")
    install(tmp_path, name="alert", code=code)

    assert "its settings use variables of the dispatcher: DISPATCHER_ALERT_EMAIL_TO" in mistake(
        {"DISPATCHER_PROVIDERS": "alert"}
    )


def test_a_package_with_the_name_of_a_built_in_provider_is_refused_and_doctor_warns_of_it(tmp_path: Path) -> None:
    install(tmp_path, name="capture")
    why = "capture is a built-in provider, but email-dispatcher-capture 1.0 provides a second"

    found = mistake({"DISPATCHER_PROVIDERS": "capture", "DISPATCHER_CAPTURE_DIR": str(tmp_path)})
    (warning,) = check_packages()

    assert found.startswith(f"DISPATCHER_PROVIDERS: {why}")
    assert warning.state is CheckState.WARNING
    assert warning.detail.startswith(f"if DISPATCHER_PROVIDERS includes capture, `dispatcher run` fails: {why}")


def test_two_packages_with_one_name_are_refused(tmp_path: Path) -> None:
    install(tmp_path)
    install(tmp_path, name="other", provides="journal")

    assert "which several packages provide: email-dispatcher-journal 1.0, email-dispatcher-other 1.0" in mistake()


def test_the_command_line_shows_the_provider_and_masks_its_secret(tmp_path: Path) -> None:
    install(tmp_path)
    own = {"DISPATCHER_JOURNAL_FILE": "/tmp/log", "DISPATCHER_JOURNAL_TOKEN": "t0ken"}
    commandline = CommandLine(tmp_path, NAMED | own | {"PYTHONPATH": str(tmp_path)})

    shown = {line["variable"]: line["value"] for line in commandline("config", "--json").json["settings"]}
    assert (shown["DISPATCHER_JOURNAL_FILE"], shown["DISPATCHER_JOURNAL_TOKEN"]) == ("/tmp/log", "***")
    ended = commandline("doctor", "--json")
    assert "package email-dispatcher-journal 1.0" in ended.stdout
    assert "DISPATCHER_JOURNAL_FILE is no setting" not in ended.stderr


PACKAGE = Path(__file__).parents[2] / "examples" / "log_channel"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The module of the package, from the wheel that the package's own build makes."""
    source = tmp_path_factory.mktemp("packages")
    for path in PACKAGE.glob("*.*"):
        shutil.copy(path, source)
    build = "import setuptools.build_meta as backend; print(backend.build_wheel('.'))"
    built = subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True, text=True)
    shutil.unpack_archive(source / built.stdout.split()[-1], source / "there", "zip")
    sys.path.insert(0, str(source / "there"))
    yield import_module(LOG)
    sys.path.remove(str(source / "there"))
    del sys.modules[LOG]


def a_line(**changes: Any) -> OutgoingEmail:
    return a_text(**{"to": ("orders",), "sender": "", "channel": "log", **changes})


@dataclass
class LogPlace:
    provider: Provider
    folder: Path

    def _lines(self) -> list[dict[str, Any]]:
        return [orjson.loads(line) for path in self.folder.glob("*.log") for line in path.read_bytes().splitlines()]

    def times(self) -> Counter[str]:
        return Counter(line["id"] for line in self._lines())

    def texts(self) -> list[str]:
        return [line["text"] for line in self._lines()]


@asynccontextmanager
async def log_place(folder: Path) -> AsyncIterator[LogPlace]:
    module = sys.modules[LOG]
    yield LogPlace(module.LogProvider(folder / "logs"), folder / "logs")


@pytest.mark.usefixtures("installed")
class TestLog(TextConformance, place=log_place):
    message = staticmethod(a_line)


def test_its_message_is_stored_as_every_other(installed: Any) -> None:
    line = installed.LogLine(message_key="order-17", to="orders", text="Order 17 was paid.")
    other = installed.LogLine(message_key="order-17", to="orders", text="Order 18 was paid.")

    assert (line.channel, line.to, line.sender) == ("log", ("orders",), "")
    assert installed.LogLine.from_json(line.to_json()) == line
    assert line.payload_hash() != other.payload_hash()


def test_its_provider_is_configured_like_the_others(installed: Any, tmp_path: Path) -> None:
    settings = load({"DISPATCHER_PROVIDERS": "smtp,log", "DISPATCHER_LOG_DIR": str(tmp_path)})

    assert settings.providers == ("smtp", "log")
    assert installed.LogProvider.open(settings).capabilities.channel == "log"
