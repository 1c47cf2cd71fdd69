"""An operator action as one typed record. From it are derived the command, the HTTP operation, the form of the
operators' page, and the call of the client; `runner.py` runs it, the same for all of them.

    class SetTenant(Change[TenantLimit], name="tenants set", http="PUT /v1/tenants/{tenant_id}", query="set_tenant"):
        \"""Set a tenant's rate and share.\"""

        tenant_id: str = field(TENANT, "The tenant.")
        weight: float | None = field(LIMIT, "The share within a lane.", default=None)

The record imports only `domain`, so `--help` and the client load neither psycopg nor the API.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum
from typing import Any, ClassVar, Final, Generic, TypeVar, dataclass_transform, overload

from dispatcher.domain.api_key import Scope
from dispatcher.domain.kinds import REASON, Kind
from dispatcher.errors import DispatcherError

R_co = TypeVar("R_co", covariant=True)
T = TypeVar("T")
A = TypeVar("A", bound="Action[Any]")

_REQUIRED: Final = object()
_PATH_NAME: Final = re.compile(r"{(\w+)}")


class Reach(Enum):
    """Who may use an action, besides the scope."""

    ALL_TENANTS = "all"
    """Only who sees all tenants: the action changes something that tenants share."""
    OWN_TENANT = "own"
    """Everyone with the scope, for the own tenant. The action has a field `tenant_id`; the runner fills it in."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why an action was not carried out: the problem's code over HTTP, and the words in every face.

    Attributes:
        name: How the runner and hooks name the refusal.
        words: A sentence; names in braces are replaced by the action's fields.
    """

    name: str
    code: str
    words: str
    remedy: str | None = None


class Refused(DispatcherError):
    """An action was refused.

    Attributes:
        name: The refusal's name in the action.
    """

    def __init__(self, name: str, code: str, message: str, remedy: str | None) -> None:
        super().__init__(message, remedy=remedy)
        self.name = name
        self.code = code


@dataclass(frozen=True, slots=True)
class Mistake:
    """One mistake in a request: a predicate about a field, or about the whole request if the field is empty."""

    field: str
    rule: str


class Mistakes(Exception):
    """All mistakes of one request."""

    def __init__(self, mistakes: list[Mistake]) -> None:
        super().__init__("; ".join(f"{each.field} {each.rule}".strip() for each in mistakes))
        self.mistakes = mistakes


@dataclass(slots=True)
class Field:
    """A field of an action: its kind, and one sentence about it."""

    kind: Kind[Any]
    about: str
    default: Any
    name: str = ""

    @property
    def is_required(self) -> bool:
        return self.default is _REQUIRED

    @property
    def label(self) -> str:
        """The field in words: `Tenant`, `Per second`."""
        return label(self.name)


def label(name: str) -> str:
    """A field or a column in words: `Tenant` for `tenant_id`, `Per second` for `per_second`."""
    return name.removesuffix("_id").replace("_", " ").capitalize()


def flag(name: str) -> str:
    """The command's option for a field: `--per-second`."""
    return f"--{name.removesuffix('_id' if name == 'tenant_id' else '_seconds').replace('_', '-')}"


def example(action: type[Action[Any]]) -> dict[str, Any]:
    """The fields of the action's first example, in JSON; the reason is added if the command needs none."""
    words = shlex.split(action.examples[0])[2:]
    flags = {flag(name): name for name in action.fields}
    names = iter(action.path_names())
    found: dict[str, Any] = {}
    while words:
        word = words.pop(0)
        if word not in flags and not action.path_names():
            continue
        name, text = (flags[word], words.pop(0)) if word in flags else (next(names), word)
        found[name] = action.fields[name].kind.parse(text)
    return found if action.is_list else {**found, "reason": found.get("reason", "see ticket 4711")}


def path_of(action: type[Action[Any]]) -> str:
    """The path to which the page's form of an action is posted: `/tenants/set`."""
    return "/" + action.name.replace(" ", "/")


def cell(action: type[Action[Any]], name: str, value: object) -> object:
    """A value as a cell of a table; None becomes the action's words for it, or a dash."""
    if value is None:
        return action.missing.get(name, "-")
    if isinstance(value, float):
        return f"{value:g}"
    return f"{value:,}" if isinstance(value, int) else value


@overload
def field(kind: Kind[T], about: str) -> T: ...
@overload
def field(kind: Kind[T], about: str, *, default: T) -> T: ...
@overload
def field(kind: Kind[T], about: str, *, default: None) -> T | None: ...
def field(kind: Kind[Any], about: str, *, default: Any = _REQUIRED) -> Any:
    """Declares a field."""
    return Field(kind, about, default)


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(field,))
class Action(Generic[R_co]):
    """What operators do. `R_co` is the result: a row type, or a list of a row type.

    Attributes:
        name: The subject and the verb, as on the command line.
        http: The method and the path.
        query: The named statement. Its parameters are the fields, and for a change also `actor` and `reason`.
        refusals: Why the action may not be carried out. The first one also means that the statement returned no row.
        constants: More parameters of the query.
        some_of: Fields of which at least one must be given.
        done: What the command and the page say afterwards.
        tells_row: Whether the command also says the row's `describe()`.
        metric: The name of the counter in `telemetry.metrics` that counts the result's rows; None: nothing is counted.
        examples: Command lines without `dispatcher`.
    """

    name: ClassVar[str]
    http: ClassVar[str]
    query: ClassVar[str]
    scope: ClassVar[Scope]
    reach: ClassVar[Reach]
    row: ClassVar[type[Any]]
    fields: ClassVar[Mapping[str, Field]] = {}
    is_list: ClassVar[bool] = False
    refusals: ClassVar[tuple[Refusal, ...]] = ()
    some_of: ClassVar[tuple[str, ...]] = ()
    one_of: ClassVar[tuple[str, ...]] = ()
    done: ClassVar[str] = ""
    tells_row: ClassVar[bool] = False
    nothing: ClassVar[str] = ""
    missing: ClassVar[Mapping[str, str]] = {}
    constants: ClassVar[Mapping[str, object]] = {}
    metric: ClassVar[str | None] = None
    examples: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(
        cls,
        *,
        name: str = "",
        http: str = "",
        query: str = "",
        scope: Scope = Scope.OPERATE,
        reach: Reach = Reach.ALL_TENANTS,
    ) -> None:
        cls.name, cls.http, cls.query, cls.scope, cls.reach = name, http, query, scope, reach
        own = {each: value for each, value in vars(cls).items() if isinstance(value, Field)}
        for each, value in own.items():
            value.name = each
        bases = (getattr(base, "fields", {}) for base in reversed(cls.__mro__[1:]))
        cls.fields = own | {each: value for fields in bases for each, value in fields.items() if each not in own}
        for base in getattr(cls, "__orig_bases__", ()):
            (found, *_) = getattr(base, "__args__", (None,))
            if isinstance(found, type):
                cls.row = found

    def __init__(self, **values: Any) -> None:
        for name, each in self.fields.items():
            if name not in values and each.is_required:
                raise TypeError(f"{type(self).__name__} needs {name}")
            setattr(self, name, values.pop(name, None if each.is_required else each.default))
        if values:
            raise TypeError(f"{type(self).__name__} has no {', '.join(values)}")

    @classmethod
    def subject(cls) -> str:
        """The subject: `tenants`."""
        return cls.name.partition(" ")[0]

    @classmethod
    def rows(cls) -> dict[str, type[Any]]:
        """The named statements that the action uses, each with the type of its rows."""
        return {cls.query: cls.row}

    @classmethod
    def verb(cls) -> str:
        """The verb: `set`."""
        return cls.name.rpartition(" ")[2]

    @classmethod
    def path_names(cls) -> list[str]:
        """The fields that are in the path. They are the command's arguments; the other fields are its options."""
        return _PATH_NAME.findall(cls.http)

    @classmethod
    def summary(cls) -> tuple[str, str]:
        """The docstring's first sentence, and the other sentences."""
        first, _, rest = " ".join((cls.__doc__ or "").split()).partition(". ")
        return first.rstrip("."), rest

    def values(self) -> dict[str, Any]:
        """The fields and their values."""
        return {name: getattr(self, name) for name in self.fields}

    def refused(self, name: str | None = None) -> Refused:
        """The error for a refusal of this action; without a name, for the first one."""
        of = next(each for each in self.refusals if name in (None, each.name))
        return Refused(of.name, of.code, of.words.format_map(self.values()), of.remedy)


class Listing(Action[list[T]]):
    """An action that reads rows. `nothing` is said if there are none; `missing` has the words for a column's null."""

    is_list = True


class Change(Action[R_co]):
    """An action that changes something. The statement writes the audit record.

    Attributes:
        needs_reason: Whether the command needs `--reason`, too. HTTP and the page always need a reason.
    """

    needs_reason: ClassVar[bool] = True
    reason: str = field(REASON, "The reason, for the audit log: a few words, without addresses.", default="")


def read(
    action: type[A],
    given: Mapping[str, object],
    texts: Mapping[str, str],
    *,
    is_reason_required: bool = False,
    only: Collection[str] | None = None,
) -> A:
    """Reads an action.

    Args:
        given: The fields in JSON.
        texts: Fields as texts. An empty text counts as missing.
        only: The fields that are allowed here; None for all.
        is_reason_required: Whether a change needs a reason: always, except on the command line.

    Raises:
        Mistakes: all mistakes of the request.
    """
    mistakes: list[Mistake] = []
    values: dict[str, Any] = {}
    known = action.fields if only is None else only
    for name in sorted((given.keys() | texts.keys()) - set(known)):
        near = get_close_matches(name, known, 1)  # never repeat the name: it may be private
        hint = f"did you mean {near[0]}?" if near else f"allowed: {', '.join(known)}"
        mistakes.append(Mistake("", f"has an unknown field; {hint}"))
    for name, each in action.fields.items():
        try:
            if name in given:
                values[name] = each.kind.of_json(given[name])
            elif texts.get(name, "").strip():
                values[name] = each.kind.of_text(texts[name])
            elif each.is_required or (name == "reason" and is_reason_required):
                mistakes.append(Mistake(name, "is required"))
        except ValueError as error:
            mistakes.append(Mistake(name, str(error)))
    if action.some_of and not any(each in given or texts.get(each) for each in action.some_of):
        mistakes.append(Mistake("", f"needs at least one of: {', '.join(action.some_of)}"))
    wrong = {each.field for each in mistakes}
    if action.one_of and not wrong & set(action.one_of) and sum(each in values for each in action.one_of) != 1:
        mistakes.append(Mistake(action.one_of[0], f"is required, or another one of: {', '.join(action.one_of)}"))
    if mistakes:
        raise Mistakes(mistakes)
    return action(**values)
