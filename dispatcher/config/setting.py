"""Declares and reads settings. A setting is a dataclass field with a variable, a default, a parser and a help text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import field, fields
from typing import Any, Final, NamedTuple, TypeVar

from dispatcher.config import values
from dispatcher.domain.values import dataclass, replace

PREFIX: Final = "DISPATCHER_"
_RATE_LIMIT: Final = "max_per_second"

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
    shared: bool | None = None,
    may_be_empty: bool = True,
) -> T:
    """Declares a field of `Settings`, or of a provider's settings.

    Args:
        parse: Converts the variable's text to the value. Raises ValueError if the text is invalid. The message follows
            the variable's name, such as `must be on or off`.
        default: The text to parse if the variable is unset; None to use `empty` as the value instead.
        about: One sentence for `dispatcher config` and the documentation.
        variable: The variable's name, if it differs from the prefix and the field's name in capitals.
        secret: Whether the value must never be shown. A secret can also be read from a file: a second variable,
            `<variable>_FILE`, has the file's path.
        is_secret_path: Whether the value is a URL whose path is secret.
        empty: The value if the variable is unset and `default` is None.
        needed: If the provider requires this setting: a phrase that says what to set the variable to. Otherwise None.
        shared: Whether an account that does not set it has the value of its provider. By default, if it is neither
            needed nor secret: so that a missing login never becomes the login of another account.
        may_be_empty: Whether an empty variable counts as unset. If not, it is parsed, and may be invalid.
    """
    is_shared = not (secret or needed) if shared is None else shared
    declared = Setting(
        "", variable or "", parse, default, about, secret, is_secret_path, needed, is_shared, may_be_empty
    )
    if default is None:
        return field(default=empty, repr=not secret, metadata={Setting: declared})  # type: ignore[return-value]
    return field(default_factory=lambda: parse(default), repr=not secret, metadata={Setting: declared})


class Setting(NamedTuple):
    """A declared setting: the field `name`, and what the function `setting` explains."""

    name: str
    variable: str
    parse: Callable[[str], Any]
    default: str | None
    about: str
    secret: bool
    is_secret_path: bool
    needed: str | None
    is_shared: bool
    may_be_empty: bool


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a setting's value comes from: `environment`, `default`, `file` (the one in `<variable>_FILE`), `env-file`
    (the option --env-file), or `provider` (an account has its provider's). `text` is None if the default is used."""

    variable: str
    text: str | None
    source: str


def settings_in(kind: type, prefix: str = PREFIX, account: str = "") -> tuple[Setting, ...]:
    """The settings that a dataclass declares, in the order of its fields, but with `max_per_second` at the end.
    `prefix` has the account's name; in a variable without the prefix, `account` follows the first word."""
    own = f"_{account.upper()}_" if account else "_"
    found = [
        declared._replace(
            name=item.name, variable=declared.variable.replace("_", own, 1) or f"{prefix}{item.name.upper()}"
        )
        for item in fields(kind)
        if (declared := item.metadata.get(Setting))
    ]
    return tuple(sorted(found, key=lambda each: each.name == _RATE_LIMIT))


def secrets_in(own: object) -> tuple[list[str], list[str]]:
    """The secrets in a provider's settings, and the user names that belong to them."""
    found = [getattr(own, each.name) for each in settings_in(type(own)) if each.secret]
    parts = [part for value in found for part in (value if isinstance(value, tuple) else (value,))]
    servers = [part for part in parts if isinstance(part, values.SmtpServer)]
    texts = [part.decode("utf-8", "replace") if isinstance(part, bytes) else part for part in parts]
    secrets = [text for text in texts if isinstance(text, str)] + [server.password for server in servers]
    return secrets, [server.username for server in servers]


class SettingReader:
    """Reads settings from an environment, and collects their origins, and a sentence per mistake."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self.origins: dict[str, Origin] = {}
        self.mistakes: list[str] = []
        self.invalid: set[str] = set()

    def read(self, kind: type[T], prefix: str = PREFIX, account: str = "", shared: Iterable[Setting] = ()) -> T:
        """Reads the settings that a dataclass declares. An invalid setting gets its default value. `shared`: the
        settings of the provider, whose values an account has if it does not set its own."""
        declared = settings_in(kind, prefix, account)
        found = {each.name: self.read_one(each) for each in declared}
        for own, its in zip(declared, shared, strict=False):
            if own.is_shared and self.origins[own.variable].text is None and self.origins[its.variable].text:
                self.origins[own.variable] = replace(self.origins[its.variable], source="provider")
                found[own.name] = () if its.variable in self.invalid else self._parsed(its)
        return kind(**{name: value[0] for name, value in found.items() if value})

    def read_one(self, declared: Setting) -> tuple[Any, ...]:
        """The value; nothing if the variable is not set, or invalid."""
        self.origins[declared.variable] = Origin(declared.variable, None, "default")
        try:
            self.origins[declared.variable] = self._find(declared)
            return self._parsed(declared)
        except ValueError as error:
            self.mistakes.append(f"{declared.variable} {error}.")
            self.invalid.add(declared.variable)
            return ()

    def _parsed(self, declared: Setting) -> tuple[Any, ...]:
        text = self.origins[declared.variable].text
        return () if text is None else (declared.parse(text),)

    def _find(self, wanted: Setting) -> Origin:
        variable, file_variable = wanted.variable, f"{wanted.variable}_FILE"
        if self._environ.get(variable) and self._environ.get(file_variable):
            raise ValueError(f"cannot be combined with {file_variable}; set only one of the two")
        if (text := self._environ.get(variable)) or (text is not None and not wanted.may_be_empty):
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
        raise ValueError(f"is empty: the file in {file_variable} contains no text")
    return text
