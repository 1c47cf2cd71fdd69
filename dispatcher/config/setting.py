"""What a setting is: one field of a dataclass, with its variable, default, parser and help; and how it is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final, TypeVar

from dispatcher.config import values

PREFIX: Final = "DISPATCHER_"
CEILING: Final = "max_per_second"

T = TypeVar("T")


def setting(
    parse: Callable[[str], T],
    default: str | None,
    about: str,
    *,
    variable: str | None = None,
    secret: bool = False,
    is_secret_path: bool = False,
    empty: T | None = None,
    needed: str | None = None,
) -> T:
    """A field of `Settings`, or of a provider's own settings.

    Args:
        parse: From the variable's text to the value; raises ValueError with the sentence for the operator.
        default: The text that stands for an unset variable; None if the setting has none and `empty` is its value then.
        about: One sentence for `dispatcher config` and the documentation.
        variable: The variable's name where it is not the prefix and the field's name.
        secret: Never shown; may come from a file, which the variable with `_FILE` appended names.
        is_secret_path: The value is a URL whose path is secret.
        empty: The value of an unset setting without default.
        needed: Of a provider's setting that must be set where the provider is named: what to set it to.
    """
    metadata = {
        "parse": parse,
        "default": default,
        "about": about,
        "variable": variable,
        "secret": secret,
        "is_secret_path": is_secret_path,
        "needed": needed,
    }
    if default is None:
        return field(default=empty, repr=not secret, metadata=metadata)  # type: ignore[return-value]
    return field(default_factory=lambda: parse(default), repr=not secret, metadata=metadata)


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting as it was declared; see `setting`.

    Attributes:
        name: The field's.
    """

    name: str
    variable: str
    parse: Callable[[str], Any]
    default: str | None
    about: str
    secret: bool
    is_secret_path: bool
    needed: str | None


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a setting's value came from, for `dispatcher config`.

    Attributes:
        variable: The environment variable.
        text: What was read; None if it stands at its default.
        source: `environment`, `file` or `default`; for the command line also `env-file`.
    """

    variable: str
    text: str | None
    source: str


def settings_in(kind: type, prefix: str = PREFIX) -> tuple[Setting, ...]:
    """The settings that a dataclass declares, in order; a provider's ceiling last."""
    found = [
        Setting(item.name, **{**item.metadata, "variable": item.metadata["variable"] or f"{prefix}{item.name.upper()}"})
        for item in fields(kind)
        if "parse" in item.metadata
    ]
    return tuple(sorted(found, key=lambda each: each.name == CEILING))


class SettingReader:
    """Reads settings from one environment, and remembers where each came from.

    Attributes:
        origins: By variable.
        mistakes: A sentence each, which begins with the variable.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self.origins: dict[str, Origin] = {}
        self.mistakes: list[str] = []
        self.mistaken: set[str] = set()

    def read(self, kind: type[T], prefix: str = PREFIX) -> T:
        """The dataclass as the environment has it; a mistaken setting stands at its default."""
        found: dict[str, Any] = {}
        for each in settings_in(kind, prefix):
            self.origins[each.variable] = Origin(each.variable, None, "default")
            try:
                origin = self.origins[each.variable] = self._find(each)
                if origin.text is not None:
                    found[each.name] = each.parse(origin.text)
            except ValueError as error:
                self.mistakes.append(f"{each.variable} {error}.")
                self.mistaken.add(each.variable)
        return kind(**found)

    def _find(self, wanted: Setting) -> Origin:
        variable, file_variable = wanted.variable, f"{wanted.variable}_FILE"
        if self._environ.get(variable) and self._environ.get(file_variable):
            raise ValueError(f"and {file_variable} are both set; set one of them")
        if text := self._environ.get(variable):
            return Origin(variable, text.strip(), "environment")
        if wanted.secret and (path := self._environ.get(file_variable)):
            return Origin(variable, _read_secret(file_variable, path), "file")
        return Origin(variable, None, "default")


def _read_secret(file_variable: str, path: str) -> str:
    try:
        text = values.path_of(path).read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot be read from the file in {file_variable}: {type(error).__name__}") from None
    if not text:
        raise ValueError(f"is empty in the file that {file_variable} names")
    return text
