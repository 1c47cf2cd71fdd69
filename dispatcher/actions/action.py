"""An operator action as one typed record. From it are derived the command, the HTTP operation, the form of the
operators' page, and the call of the client; `runner.py` runs it, the same for all of them.

    class SetTenant(Change[TenantLimit], name="tenants set", http="PUT /v1/tenants/{tenant_id}", query="set_tenant"):
        \"""Set a tenant's rate and share.\"""

        tenant_id: str = field(TENANT, "The tenant.")
        weight: float | None = field(LIMIT, "The share within a lane.", default=None)

The record imports only `domain`, so `--help` and the client load neither psycopg nor the API.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, ClassVar, Final, Generic, Self, TypeVar, dataclass_transform, overload

from dispatcher.domain.api_key import Scope
from dispatcher.domain.kinds import PAGE_ROWS, REASON, Kind, Wrong, cursor, cursor_text, cursor_values
from dispatcher.domain.status import Status
from dispatcher.domain.text import shown, unknown_fault
from dispatcher.domain.values import dataclass
from dispatcher.errors import DispatcherError

R_co = TypeVar("R_co", covariant=True)
T = TypeVar("T")
A = TypeVar("A", bound="Action[Any]")

MAX_UNKNOWN: Final = 20
"""The most unknown fields that a refusal names."""
_REQUIRED: Final = object()
_PATH_NAME: Final = re.compile(r"{(\w+)(?::\w+)?}")


class Reach(Enum):
    """Whose rows an action is about. `runner.tenant_of` has the table for all faces."""

    ALL_TENANTS = "all"
    """What tenants share: only who sees all tenants may use the action."""
    ONE_TENANT = "one"
    """One tenant's rows. The action has a field `tenant_id`, which the runner fills in."""
    ANY_TENANT = "any"
    """As ONE_TENANT, but commands and the page select all tenants' rows if no tenant is given."""
    SEEN_TENANTS = "seen"
    """As ANY_TENANT, and HTTP, too, selects the rows of all tenants that the key sees."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why an action was not carried out: the problem's code over HTTP, and the words in every face.

    Attributes:
        words: A sentence; names in braces are replaced by the action's fields.
    """

    name: str
    code: str
    words: str
    remedy: str | None = None


class Refused(DispatcherError):
    """An action was refused. `name` is the refusal's name in the action."""

    def __init__(self, name: str, code: str, message: str, remedy: str | None) -> None:
        super().__init__(message, remedy=remedy)
        self.name = name
        self.code = code


@dataclass(frozen=True, slots=True)
class Mistake:
    """One mistake in a request: a predicate about a field, or about the whole request if the field is empty.

    Attributes:
        path: The place within the field, such as `3` for the fourth item of a list.
    """

    field: str
    rule: str
    path: str = ""


class Mistakes(Exception):
    """All mistakes of one request."""

    def __init__(self, mistakes: list[Mistake]) -> None:
        super().__init__("; ".join(f"{each.field} {each.rule}".strip() for each in mistakes))
        self.mistakes = mistakes


@dataclass(slots=True)
class Field:
    """A field of an action: its kind, and one sentence about it.

    Attributes:
        option: The option of the command, if it is not made from the name (see `flag`).
    """

    kind: Kind[Any]
    about: str
    default: Any
    option: str = ""
    name: str = ""

    @property
    def is_required(self) -> bool:
        return self.default is _REQUIRED

    @property
    def label(self) -> str:
        """The field in words: `Tenant`, `Per second`; `Older than` for `older_than_seconds`, which takes `2h`, too."""
        return label(self.name.removesuffix("_seconds"))

    @property
    def help(self) -> str:
        """What the field is, with its default."""
        if "[default" in self.about or self.is_required or self.default in (None, False, "", ()):
            return self.about
        values = self.default if isinstance(self.default, tuple) else (self.default,)
        shown = ", ".join(f"{each:g}" if isinstance(each, float) else str(each) for each in values)
        return f"{self.about}  [default: {shown}]"

    @property
    def flag(self) -> str:
        """The command's option: `--per-second`; `--tenant` for `tenant_id`, `--older-than` for `older_than_seconds`."""
        name = self.name.removesuffix("_id" if self.name == "tenant_id" else "_seconds")
        return self.option or f"--{name.replace('_', '-')}"


def label(name: str) -> str:
    """A field or a column in words: `Tenant` for `tenant_id`, `Per second` for `per_second`."""
    return name.removesuffix("_id").replace("_", " ").replace("-", " ").capitalize().replace("Url", "URL")


def example(action: type[Action[Any]], line: str = "") -> dict[str, Any]:
    """The fields of an example of the action, in JSON; a reason is added if the command needs none."""
    words = shlex.split(line or action.examples[0])[len(action.name.split()) :]
    flags = {each.flag: each for each in action.fields.values()}
    names = action.argument_names()
    found: dict[str, Any] = {}
    while words and words[0] != "|":
        word = words.pop(0)
        if word in flags:
            field = flags[word]
            found[field.name] = True if field.kind.is_flag else field.kind.parse(words.pop(0))
        elif names and (kind := action.fields[names[0]].kind).is_list:
            found.setdefault(names[0], []).extend(kind.parse(word))
        elif names:
            name = names.pop(0)
            found[name] = action.fields[name].kind.parse(word)
    return found if "reason" not in action.fields else {**found, "reason": found.get("reason", "see ticket 4711")}


def path_of(action: type[Action[Any]]) -> str:
    """The path to which the page's form of an action is posted: `/tenants/set`."""
    return "/" + action.name.replace(" ", "/")


def cell(action: type[Action[Any]], name: str, value: object) -> object:
    """A value as a cell of a table; None becomes the action's words for it, or a dash."""
    if isinstance(value, Mapping):
        value = [
            f"{key}: {each if isinstance(each, str) else json.dumps(each)}"
            for key, each in value.items()
            if each is not None
        ]
    if isinstance(value, (list, tuple)):
        value = ", ".join(map(str, value)) or "-"
    if value is None:
        return action.missing.get(name, "-")
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    return f"{value:,}" if isinstance(value, int) else value


@overload
def field(kind: Kind[T], about: str, *, option: str = "") -> T: ...
@overload
def field(kind: Kind[T], about: str, *, default: T, option: str = "") -> T: ...
@overload
def field(kind: Kind[T], about: str, *, default: None, option: str = "") -> T | None: ...
def field(kind: Kind[Any], about: str, *, default: Any = _REQUIRED, option: str = "") -> Any:
    """Declares a field.

    Args:
        default: The value if the field is not given; without it, the field is required.
        option: The option of the command, such as `--rate`; by default, it is made from the field's name.
    """
    return Field(kind, about, default, option)


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(field,))
class Action(Generic[R_co]):
    """What operators do. `R_co` is the result: a row type, or a list or a page of a row type.

    Attributes:
        name: The subject and the verb, as on the command line.
        http: The method and the path. The fields in the path are the command's arguments.
        former: An earlier verb, which the command line still accepts.
        arguments: Fields that are the command's arguments, too. The last one may be a list.
        query: The named statement. Its parameters are the fields, and for a change also `actor` and `reason`.
        row: The type of the statement's rows. Its fields are the columns.
        refusals: Why the action may not be carried out. The first one also means that the statement returned no row.
        post_verb: The last part of the path of the POST that does the same as a DELETE; by default the verb.
        created: Where HTTP says that the new row is: the path, with the row's fields in braces.
        is_background: Whether the change only begins when HTTP answers.
        stops: A column of a paged list. A statement that examines a limited number of rows may return, as its last row,
            the last row that it has examined, with null in this column. The next page continues there.
        constants: More parameters of the query.
        some_of: The request must give at least one of these fields.
        one_of: The request must give exactly one of these fields.
        not_both: The request must not give both of these fields.
        done: What the command and the page say afterwards.
        tells_row: Whether they also say the row's `describe()`.
        secret: The field of the row with a secret, which every face shows once.
        plural: What the rows are called in JSON, if it is not the subject.
        nothing: What is said if there are no rows.
        missing: Words for null in a column.
        examples: Command lines without `dispatcher`.
    """

    name: ClassVar[str]
    http: ClassVar[str]
    query: ClassVar[str]
    former: ClassVar[str] = ""
    arguments: ClassVar[tuple[str, ...]] = ()
    scope: ClassVar[Scope] = Scope.OPERATE
    reach: ClassVar[Reach] = Reach.ALL_TENANTS
    row: ClassVar[type[Any]]
    fields: ClassVar[Mapping[str, Field]] = {}
    is_list: ClassVar[bool] = False
    key: ClassVar[Mapping[str, type[Any]]] = {}
    page_type: ClassVar[type[Page[Any]]]
    refusals: ClassVar[tuple[Refusal, ...]] = ()
    some_of: ClassVar[tuple[str, ...]] = ()
    one_of: ClassVar[tuple[str, ...]] = ()
    not_both: ClassVar[tuple[str, ...]] = ()
    done: ClassVar[str] = ""
    tells_row: ClassVar[bool] = False
    secret: ClassVar[str] = ""
    plural: ClassVar[str] = ""
    nothing: ClassVar[str] = ""
    missing: ClassVar[Mapping[str, str]] = {}
    post_verb: ClassVar[str] = ""
    created: ClassVar[str] = ""
    is_background: ClassVar[bool] = False
    stops: ClassVar[str] = ""
    constants: ClassVar[Mapping[str, object]] = {}
    examples: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(
        cls, *, name: str = "", http: str = "", query: str = "", scope: Scope | None = None, reach: Reach | None = None
    ) -> None:
        cls.name, cls.http, cls.query = name, http, query
        cls.scope, cls.reach = scope or cls.scope, reach or cls.reach
        own = {each: value for each, value in vars(cls).items() if isinstance(value, Field)}
        if cls.key and "after" not in own:
            own["after"] = Field(cursor(cls.key.values()), "Continue after an earlier page: its `next`.", None)
        for each, value in own.items():
            value.name = each
        for base in cls.__mro__[1:]:
            own |= {each: value for each, value in getattr(base, "fields", {}).items() if each not in own}
        cls.fields = own
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
    def noun(cls) -> str:
        """What the action is about: `tenants`."""
        return cls.name.partition(" ")[0]

    @classmethod
    def verb(cls) -> str:
        """The verb: `set`."""
        return cls.name.rpartition(" ")[2]

    @classmethod
    def rows(cls) -> dict[str, type[Any]]:
        """The named statements that the action uses, each with the type of its rows."""
        return {cls.query: cls.row} if cls.query else {}

    @classmethod
    def path_names(cls) -> list[str]:
        return _PATH_NAME.findall(cls.http)

    @classmethod
    def http_post(cls) -> str:
        """The method and the path, but `POST …/remove` for a DELETE: many clients and proxies drop a DELETE's body."""
        method, path = cls.http.split()
        return f"POST {path}/{cls.post_verb or cls.verb()}" if method == "DELETE" else cls.http

    @classmethod
    def argument_names(cls) -> list[str]:
        """The fields that are the command's arguments; the other fields are its options."""
        return [*cls.path_names(), *cls.arguments]

    @classmethod
    def summary(cls) -> tuple[str, str]:
        """The docstring's first sentence, and the other sentences."""
        first, _, rest = " ".join((cls.__doc__ or "").split()).partition(". ")
        return first.rstrip("."), rest

    def values(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.fields}

    def but(self, **values: Any) -> Self:
        """This action with other values of some fields."""
        return type(self)(**{**self.values(), **values})

    def refused(self, name: str | None = None, **more: object) -> Refused:
        """The error for a refusal of this action; without a name, for the first one. The words may contain `more`."""
        of = next(each for each in self.refusals if name in (None, each.name))
        return Refused(of.name, of.code, of.words.format_map({**self.values(), **more}), of.remedy)

    # What a subject overrides if it needs more than a statement. `settings` is `config.Settings`, `source` a session.

    def check(self, settings: Any) -> None:
        """Compares the fields with the settings. Raises `Mistakes`, or `self.refused(…)`."""

    async def prepare(self, source: Any, settings: Any) -> Mapping[str, Any]:
        """More parameters of the statement, such as the hash of an address. They replace the fields' values."""
        del source, settings
        return {}

    async def run(self, source: Any, parameters: Mapping[str, Any]) -> Sequence[Any]:
        """The rows. By default, executes `query`; a subject with several statements overrides this method."""
        from dispatcher.store.statements import fetch

        return await fetch(source, self.query, parameters, into=self.row)

    def for_tenant(self, rows: Sequence[Any]) -> Sequence[Any]:
        """The rows without what a tenant may not see."""
        return rows

    async def none_found(self, source: Any) -> str:
        """What the command says if there are no rows, for an operator who sees all tenants."""
        del source
        return self.nothing

    async def after_commit(self, settings: Any) -> None:
        """Does what follows the commit of a change."""


class Listing(Action[list[T]]):
    """An action that reads all rows."""

    is_list = True


@dataclass(frozen=True)
class Page(Generic[T]):
    """Rows of a paged listing, and the cursor of the rows after them; None: there are none.

    In the client, a loop over a page (`for`, and with `AsyncClient` `async for`) continues with the pages after it.
    """

    rows: list[T]
    next: str | None
    follow: ClassVar[Any] = None  # the client sets it: returns the page after a cursor

    def __iter__(self) -> Iterator[T]:
        page = self
        yield from page.rows
        while page.next is not None:
            page = page.follow(page.next)
            yield from page.rows

    async def __aiter__(self) -> AsyncIterator[T]:
        page: Page[T] | None = self
        while page is not None:
            for row in page.rows:
                yield row
            page = None if page.next is None else await page.follow(page.next)


class Paged(Action[Page[T]]):
    """An action that reads rows in pages.

    Attributes:
        page_type: A subclass of `Page` has more fields. They are in the document, too.
        key: The columns of the statement's order, with their types. The statement has the parameters `limit` and, for
            each column, `after_…`, such as `after_audit_id`. On the first page these are null.
    """

    is_list = True
    page_type: ClassVar[type[Page[Any]]] = Page
    after: str | None = field(cursor(()), "Continue after an earlier page: its `next`.", default=None)
    limit: int = field(PAGE_ROWS, "The most rows.", default=50)

    @classmethod
    def page(cls, rows: Sequence[T] | Page[T], most: int) -> Page[T]:
        """A page from at most `most + 1` rows, and possibly a row that says where the search stopped (see `stops`)."""
        if isinstance(rows, Page):  # `run` of a subject made it
            return rows
        shown, last = list(rows[:most]), None
        if len(rows) > most:
            last = rows[most - 1]
        if cls.stops and rows and getattr(rows[-1], cls.stops) is None:
            shown, last = list(rows[:-1]), rows[-1]
        return Page(shown, None if last is None else cursor_text(getattr(last, name) for name in cls.key))

    def position(self) -> dict[str, Any]:
        """The parameters of the statement for the position."""
        values = cursor_values(self.key.values(), self.after) if self.after else [None] * len(self.key)
        names = (f"after_{name}" for name in self.key)
        return {**dict(zip(names, values, strict=True)), "limit": self.limit + 1}


class Change(Action[R_co]):
    """An action that changes something. The statement writes the audit record.

    Attributes:
        needs_reason: Whether command and HTTP need a reason. The page always needs one.
        has_dry_run: Whether the command needs a reason only without `--dry-run`. HTTP then always needs one.
        statuses: The statuses in which the page of an email offers the change.
        on_one: What the change does to this email.
        asks: The fields for which this page asks, besides the reason; by default `one_of`.
        is_final: Whether it cannot be undone, or may send the email twice.
    """

    needs_reason: ClassVar[bool] = True
    has_dry_run: ClassVar[bool] = False
    statuses: ClassVar[frozenset[Status]] = frozenset()
    on_one: ClassVar[str] = ""
    asks: ClassVar[tuple[str, ...]] = ()
    is_final: ClassVar[bool] = False
    reason: str = field(REASON, "The reason, for the audit log: a few words, without addresses.", default="")

    @classmethod
    def needs_reason_over_http(cls) -> bool:
        return cls.needs_reason or cls.has_dry_run


def document(action: type[Action[Any]], result: Any) -> Any:
    """A result as the JSON document that HTTP and `--json` show: a row, or the rows under the subject's name."""
    if isinstance(result, Page):
        more = {name: getattr(result, name) for name in result.__match_args__[1:]}
        return {action.plural or action.noun(): result.rows, **more}
    return {action.plural or action.noun(): result} if action.is_list else result


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
        texts: Fields as texts.
        only: The fields that are allowed here; None for all.
        is_reason_required: Whether a change needs a reason. The command line checks this itself.

    Raises:
        Mistakes: all mistakes of the request.
    """
    values: dict[str, Any] = {}
    known = action.fields if only is None else only
    unknown = sorted((given.keys() | texts.keys()) - set(known))[:MAX_UNKNOWN]
    mistakes = [Mistake(shown(name), unknown_fault(name, known)) for name in unknown]
    both = sorted(given.keys() & texts.keys() & set(known))
    mistakes += [Mistake("", f"must leave out {name}, which is in the path") for name in both]
    for name, each in action.fields.items():
        try:
            if name in given:
                values[name] = each.kind.of_json(given[name])
            elif name in texts:
                values[name] = each.kind.of_text(texts[name])
            elif each.is_required or (name == "reason" and is_reason_required):
                mistakes.append(Mistake(name, "is required"))
        except Wrong as wrong:
            mistakes += [Mistake(name, rule, path) for path, rule in wrong.mistakes]
    if action.some_of and not any(given.get(each) is not None or texts.get(each) for each in action.some_of):
        mistakes.append(Mistake("", f"needs at least one of: {', '.join(action.some_of)}"))
    mistakes += _wrong_choices(action, values, {each.field for each in mistakes})
    if mistakes:
        raise Mistakes(mistakes)
    return action(**values)


def _wrong_choices(action: type[Action[Any]], values: Mapping[str, Any], faulty: set[str]) -> Iterator[Mistake]:
    chosen = {name for name, value in values.items() if value is not False}
    if action.one_of and not faulty & set(action.one_of) and len(chosen & set(action.one_of)) != 1:
        yield Mistake(action.one_of[0], f"is required, or another one of: {', '.join(action.one_of)}")
    if action.not_both and chosen >= set(action.not_both):
        yield Mistake(action.not_both[0], f"must not be given together with {action.not_both[1]}")
