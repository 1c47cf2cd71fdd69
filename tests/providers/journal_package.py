"""A provider in a separate package, as pip installs packages: a module, and a dist-info with an entry point."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent
from typing import Final

CODE: Final = '''
    from __future__ import annotations

    from dataclasses import dataclass
    from pathlib import Path

    from dispatcher.config import ProviderSettings, Settings, setting, values
    from dispatcher.domain.capabilities import Capabilities
    from dispatcher.domain.outcome import Accepted, Outcome, Rejected
    from dispatcher.domain.outgoing import OutgoingEmail
    from dispatcher.providers.contract import Attempt
    from dispatcher.telemetry.meters import Counter, Panel
    from dispatcher.transport.mime import rendered
    from dispatcher.transport.mime_headers import UnrenderableEmail

    LINES = Counter("dispatcher_journal_lines_total", "Lines that the journal provider wrote.", panel=Panel.SENDING)


    @dataclass(frozen=True, slots=True, kw_only=True)
    class JournalSettings(ProviderSettings):
        file: Path | None = setting(values.path_of, None, "File that gets a line per email.", needed="set a file")
        token: str = setting(values.api_key, None, "What each line begins with.", secret=True, empty="")


    class JournalProvider:
        name = "journal"
        capabilities = Capabilities(copies=1, delivers=False)
        settings = JournalSettings

        def __init__(self, file: Path) -> None:
            self._file = file

        @classmethod
        def open(cls, settings: Settings) -> JournalProvider:
            own = settings.of(JournalSettings)
            assert own.file is not None
            return cls(own.file)

        async def send(self, email: OutgoingEmail, attempt: Attempt) -> Outcome:
            try:
                with attempt.rendering:
                    await rendered(email)
            except UnrenderableEmail as error:
                return Rejected(error.reason, error.message)
            attempt.mark_on_wire()
            with self._file.open("a") as file:
                file.write(f"{email.email_id}\\n")
            LINES.add(1)
            return Accepted()

        async def check(self) -> str:
            return f"{self._file} gets a line per email."

        async def close(self) -> None:
            """Nothing is open."""
'''


def install(folder: Path, *, name: str = "journal", code: str = CODE, target: str = "JournalProvider") -> Path:
    """Write the package into a folder for sys.path; return the folder."""
    info = folder / f"email_dispatcher_{name}-1.0.dist-info"
    info.mkdir(parents=True)
    module = f"email_dispatcher_{name}"
    (folder / f"{module}.py").write_text(dedent(code))
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: email-dispatcher-{name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[email_dispatcher.providers]\n{name} = {module}:{target}\n")
    return folder
