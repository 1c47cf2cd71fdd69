"""The env file: a file of settings that the process reads when it starts, and again at SIGHUP.

A supervisor passes its own environment on to a process. If a shell has read that environment from a file, an edit of
the file has no effect until the supervisor restarts. So the process reads the file itself. The file's lines override
the environment, which may still have values from an earlier version of the file.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Final, NamedTuple

import click

from dispatcher.cli.startup_errors import log_startup_errors
from dispatcher.config import PREFIX, every_setting
from dispatcher.config.plugins import provider_names
from dispatcher.config.values import texts
from dispatcher.errors import ConfigurationError

VARIABLE: Final = f"{PREFIX}ENV_FILE"
MAX_OCTETS: Final = 1024 * 1024
_SERVICES: Final = ("run", "api")
"""Commands that log the errors which stop them during startup."""
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SECRET_NAME: Final = re.compile("SECRET|PASSWORD|TOKEN|OTLP_HEADERS")
"""Matches the names of variables in which other programs expect secrets, such as AWS_SECRET_ACCESS_KEY."""


class FileLine(NamedTuple):
    """The line number and the value of one variable in an env file."""

    number: int
    value: str


class EnvFile:
    """A file of settings that overrides the environment of this process."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self._lines: Mapping[str, FileLine] = {}
        self._overridden: dict[str, str | None] = {}

    def read(self) -> None:
        """Copies the file's values into the environment, instead of those that an earlier call copied. If it raises
        ConfigurationError, the environment is unchanged."""
        self._apply(parse(self.path, _read(self.path)))

    @contextmanager
    def read_again(self) -> Iterator[None]:
        """Reads the file again. If the `with` block raises, restores the environment."""
        lines = self._lines
        try:
            self.read()
            yield
        except BaseException:
            self._apply(lines)
            raise

    def _apply(self, lines: Mapping[str, FileLine]) -> None:
        _set_environment(self._overridden)
        # NAME in the file also overrides NAME_FILE in the environment, and vice versa, because only one of the two
        # variables is allowed.
        counterparts = {
            name.removesuffix("_FILE") if name.endswith("_FILE") else f"{name}_FILE" for name in lines
        } - lines.keys()
        self._overridden = {name: os.environ.get(name) for name in (*lines, *counterparts)}
        self._lines = lines
        _set_environment({name: line.value for name, line in lines.items()} | dict.fromkeys(counterparts))

    def sets(self, variable: str) -> bool:
        """Whether the file sets this variable, either directly or through its `…_FILE` variable."""
        return any(self._lines[name].value for name in (variable, f"{variable}_FILE") if name in self._lines)

    @property
    def overridden(self) -> list[str]:
        """Variables that had a different value in the environment before the file was read."""
        return sorted(
            name
            for name, line in self._lines.items()
            if self._overridden[name] is not None and self._overridden[name] != line.value
        )

    @property
    def secrets(self) -> list[str]:
        """Variables in the file whose values are secret."""
        listed = self._lines.get(f"{PREFIX}PROVIDERS")
        names = (*provider_names(), *texts((listed.value or "").lower() if listed else ""))
        ours = {each.variable for each in every_setting(names) if each.secret}
        named = {name for name in self._lines if _SECRET_NAME.search(name) and not name.endswith("_FILE")}
        return sorted(name for name in (ours & self._lines.keys()) | named if self._lines[name].value)

    def locate(self, mistakes: Sequence[str]) -> list[str]:
        """Adds the path and the line to each mistake about a variable in the file, such as `app.env, line 3: …`."""
        names = [mistake.partition(" ")[0] for mistake in mistakes]
        lines = [self._lines.get(name) or self._lines.get(f"{name}_FILE") for name in names]
        return [
            f"{self.path}, line {line.number}: {mistake}" if line else mistake
            for mistake, line in zip(mistakes, lines, strict=True)
        ]


def parse(path: Path, text: str) -> dict[str, FileLine]:
    """The variables that an env file's text sets. Text such as `$NAME` in a value is not expanded. Raises
    ConfigurationError, which lists every mistake with file, line and remedy, but without the value."""
    from io import StringIO

    from dotenv.parser import parse_stream

    lines: dict[str, FileLine] = {}
    mistakes: list[str] = []
    for binding in parse_stream(StringIO(text)):
        name, value, original = binding.key, binding.value, binding.original
        # `original.line` is the number of the first of the empty lines that precede the variable.
        empty = original.string.removesuffix(original.string.lstrip())
        number = original.line + len(re.findall(r"\r\n|\r|\n", empty))
        if name is None and not binding.error:
            continue  # an empty line, or a comment
        if name is None or value is None or not _NAME.fullmatch(name):
            fault = "the line is not NAME=value. Quote a value that contains quotes; start a comment with #"
        elif "\0" in value:
            fault = f"{name} has a NUL character. Remove it"
        elif name == VARIABLE:
            fault = f"{name} cannot be set in an env file. Remove the line"
        elif name in lines:
            fault = f"{name} is already set in line {lines[name].number}. Remove one of the two lines"
        else:
            lines[name] = FileLine(number, value)
            continue
        mistakes.append(f"{path}, line {number}: {fault}.")
    if mistakes:
        raise ConfigurationError(mistakes)
    return lines


def _read(path: Path) -> str:
    octets = b""
    try:
        # Without O_NONBLOCK, opening a FIFO that has no writer would block a reload for ever.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            if fault := _fault_of(path, os.fstat(file.fileno())):
                raise ConfigurationError([f"The env file {path} {fault}."])
            octets = file.read(MAX_OCTETS)
        return octets.decode("utf-8-sig")
    except OSError as error:
        remedy = "Correct the path, or let this user read it."
        raise ConfigurationError([f"The env file {path} cannot be read: {error.strerror}. {remedy}"]) from error
    except UnicodeDecodeError as error:
        line = octets.count(b"\n", 0, error.start) + 1
        raise ConfigurationError([f"{path}, line {line}: the text is not UTF-8. Save the file as UTF-8."]) from None


def _fault_of(path: Path, found: os.stat_result) -> str | None:
    if not stat.S_ISREG(found.st_mode):
        return "is not a regular file, so it could not be read again at SIGHUP. Use a regular file"
    if found.st_mode & stat.S_IWOTH:
        return f"is writable by every user of this machine. Run: chmod o-w {path}"
    if found.st_size > MAX_OCTETS:
        return "is larger than 1 MiB. Correct the path"
    return None


def _set_environment(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def current_env_file() -> EnvFile | None:
    """The env file of the running command; None if the command reads no env file."""
    context = click.get_current_context(silent=True)
    return context.meta.get(VARIABLE) if context else None


def add_env_file_option(command: click.Command) -> None:
    """Adds the option `--env-file` to a command, or to each command of a group. Idempotent."""
    if isinstance(command, click.Group):
        for part in command.commands.values():
            add_env_file_option(part)
    elif _OPTION not in command.params:
        command.params.append(_OPTION)


def _use(context: click.Context, _: click.Parameter, path: Path | None) -> None:
    if path is not None and not context.resilient_parsing:
        context.meta[VARIABLE] = file = EnvFile(path)
        is_service = context.info_name in _SERVICES
        if is_service:
            from setproctitle import getproctitle

            # In its first call, the module setproctitle uses the environment to find the memory of the process title.
            # So call any of its functions before the environment changes.
            getproctitle()
        with log_startup_errors() if is_service else nullcontext():
            file.read()


_OPTION: Final[Any] = click.Option(
    ["--env-file"],
    type=click.Path(readable=False, path_type=Path),  # `_read` checks whether the file can be read
    metavar="PATH",
    envvar=VARIABLE,
    expose_value=False,
    callback=_use,
    help=f"Read settings from this file, which overrides the environment.  [env var: {VARIABLE}]",
)
