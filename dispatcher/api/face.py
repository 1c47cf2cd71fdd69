"""Derives HTTP operations from actions (see `dispatcher.actions`): route, parameters or strict body, OpenAPI entry."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, is_dataclass, replace
from datetime import datetime
from functools import partial
from typing import Any, ClassVar, Final, get_args, get_type_hints

import msgspec
import orjson
from starlette.requests import Request
from starlette.responses import Response

from dispatcher.actions import all_actions
from dispatcher.actions.action import Action, Change, Field, Mistake, Mistakes, Refused, document, example, read
from dispatcher.actions.batch import Batch
from dispatcher.actions.dlq import REPLAYS
from dispatcher.actions.feed import ListEvents
from dispatcher.actions.runner import Face, Who, check, run
from dispatcher.admission.access import Caller
from dispatcher.admission.fair_limiter import FairSessions, FairTurns
from dispatcher.admission.off_loop import run_off_loop
from dispatcher.admission.problems import FieldError, Problem, pointer_of
from dispatcher.api.access import AccessControl
from dispatcher.api.body_reader import BodyReader
from dispatcher.api.large_json import parse
from dispatcher.api.operation import (
    BODY_PROBLEMS,
    BY_POST,
    Operation,
    object_schema,
    of_operation,
    operation_name,
    path_parameter,
    reference,
)
from dispatcher.api.validation import admit
from dispatcher.config import Settings
from dispatcher.domain.api_key import Scope
from dispatcher.store.statements import Source

CONCURRENT_LISTS: Final = 2
"""The most concurrent list queries; one tenant has at most one. More could slow down enqueueing."""
Endpoint = Callable[[Request], Awaitable[Response]]
_LOCATION: Final = {
    "Location": {"schema": {"type": "string"}, "description": "The path of what was created.", "required": True}
}
_NUMBER: Final = re.compile(r"[0-9]{1,12}(\.[0-9]{1,20})?")


@dataclass(frozen=True, slots=True)
class ActionEndpoints:
    """Serves every action that has a path."""

    access: AccessControl
    bodies: BodyReader
    sessions: FairSessions
    readers: Source
    settings: Settings
    lists: FairTurns = field(default_factory=lambda: FairTurns(CONCURRENT_LISTS))
    json_options: ClassVar = orjson.OPT_NON_STR_KEYS

    def routes(self, actions: Iterable[type[Action[Any]]]) -> Iterator[tuple[str, str, Endpoint, Operation]]:
        for action in actions:
            if issubclass(action, Batch) or not action.http:
                continue
            method, path = action.http.split()
            endpoint, described = self._endpoint(action, has_body=method != "GET"), operation(action)
            yield method, path, endpoint, described
            if method == "DELETE":
                about = f"The same as `{action.http}`, for clients and proxies that drop the body of a DELETE."
                post = replace(described, name=described.name + BY_POST, description=about)
                method, path = action.http_post().split()
                yield method, path, endpoint, post

    def _endpoint(self, action: type[Action[Any]], *, has_body: bool) -> Endpoint:
        async def with_body(request: Request) -> Response:
            caller = await self.access.authenticate(request, action.scope)
            with problems("pointer"):
                check(action, who(caller))  # before the body is read
            async with self.body(request, caller) as given:
                return await self._run(action, caller, request, given, {})

        async def without_body(request: Request) -> Response:
            async with self.access.admit(request, action.scope) as caller:
                texts = query(request)
                numbers = {name: float(texts.pop(name)) for name in _numbers(action, texts)}
                return await self._run(action, caller, request, numbers, texts)

        return with_body if has_body else without_body

    @asynccontextmanager
    async def body(self, request: Request, caller: Caller) -> AsyncIterator[dict[str, object]]:
        """Yields the fields of the body, which may be missing. Occupies a request slot during the block.

        Without a key, it may not be missing: a body in JSON is what no form of another website can send.
        """
        if (
            caller.key is not None
            and request.headers.get("content-length", "0") == "0"
            and "transfer-encoding" not in request.headers
        ):
            with self.access.slot(caller.name):
                yield {}
            return
        async with self.bodies.read(request, caller.name) as body:
            given = await run_off_loop(len(body), lambda: parse(body))
            if not isinstance(given, dict):
                raise Problem("invalid-body", errors=[FieldError("pointer", "#", "must be an object")])
            yield given

    async def _run(
        self,
        action: type[Action[Any]],
        caller: Caller,
        request: Request,
        given: Mapping[str, object],
        texts: Mapping[str, str],
    ) -> Response:
        in_path = {name: str(value) for name, value in request.path_params.items()}
        location = "parameter" if request.method == "GET" else "pointer"
        actor = replace(who(caller), admit=partial(admit, self.access, self.settings, caller))
        with problems(location, in_path):
            needs_reason = issubclass(action, Change) and action.needs_reason_over_http()
            asked = read(action, given, {**texts, **in_path}, is_reason_required=needs_reason)
            if asked.is_list:  # not on the few sessions that changes wait for
                async with self.lists.turn(caller.share):
                    result = await run(self.readers, asked, actor, self.settings)
            else:
                async with self.sessions.of(caller.share) as connection:
                    result = await run(connection, asked, actor, self.settings)
        return self.answer(asked, caller, result)

    def answer(self, asked: Action[Any], caller: Caller, result: Any) -> Response:
        """The response with the result of an action; `caller` may see it."""
        del caller
        row = type(asked).row.__match_args__ if asked.created else ()
        where = asked.created.format_map({name: getattr(result, name) for name in row})
        body = orjson.dumps(document(type(asked), result), option=self.json_options)
        return Response(body, status_of(type(asked)), {"Location": where} if where else {}, "application/json")


def status_of(action: type[Action[Any]]) -> int:
    return 202 if action.is_background else 201 if action.created else 200


def who(caller: Caller) -> Who:
    if (key := caller.key) is None:
        return Who(Face.OPEN_HTTP, "api")
    scopes = frozenset(map(Scope, key.scopes))
    name = f"api key ed_{key.key_id} ({key.name})"
    return Who(Face.HTTP, name, key.tenant_id, scopes, sees_content=caller.sees_content, is_test=caller.is_test)


def json_response(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS), status, headers, "application/json")


@contextmanager
def problems(location: str, in_path: Collection[str] = ()) -> Iterator[None]:
    """Translates what `read` and the runner raise. `location`: `pointer`, or `parameter` as for fields in the path."""
    try:
        yield
    except Refused as error:
        remedy = error.remedy if error.code != "not-found" else None  # it names the command that lists what there is
        raise Problem(error.code, f"{error.message} {remedy or ''}".strip()) from None
    except Mistakes as error:
        errors = [_error(each, "parameter" if each.field in in_path else location) for each in error.mistakes[:20]]
        is_body = any(each.location == "pointer" for each in errors)
        raise Problem("invalid-body" if is_body else "invalid-parameter", errors=errors) from None


def _error(mistake: Mistake, location: str) -> FieldError:
    if location == "pointer":
        path = pointer_of(mistake.field) if mistake.field else "#"
        return FieldError(location, f"{path}/{mistake.path}" if mistake.path else path, mistake.rule)
    return FieldError(location, mistake.field, mistake.rule)


def _numbers(action: type[Action[Any]], texts: Mapping[str, str]) -> list[str]:
    """The parameters that are numbers, such as seconds. Without this, only `2h` would be such a number."""
    numbers = {name for name, each in action.fields.items() if each.kind.schema.get("type") == "number"}
    return [name for name, text in texts.items() if name in numbers and _NUMBER.fullmatch(text)]


def query(request: Request) -> dict[str, str]:
    given = request.query_params.multi_items()
    if len(given) > len(dict(given)):
        raise Problem("invalid-parameter", "A parameter is given twice.")
    return dict(given)


def operation(action: type[Action[Any]]) -> Operation:
    method, _ = action.http.split()
    summary, rest = action.summary()
    in_path = action.path_names()
    fields = {name: _schema(each) for name, each in action.fields.items()}
    body = {} if method == "GET" else body_of(action)
    parameters = [path_parameter(name, *_split(fields[name])) for name in in_path]
    if method == "GET":
        parameters += [
            {
                **path_parameter(name, *_split(schema)),
                "in": "query",
                "required": action.fields[name].is_required,
                **({"explode": False} if schema.get("type") == "array" else {}),  # commas separate the items
            }
            for name, schema in fields.items()
            if name not in in_path
        ]
    return Operation(
        name=operation_name(action),
        summary=summary,
        description=of_operation(rest) or f"{summary}.",
        response_schema=_plural(action) if action.is_list else action.row.__name__,
        status=status_of(action),
        headers=_LOCATION if action.created else {},
        request_schema=None if method == "GET" else action.__name__,
        needs_body=not body.keys().isdisjoint(("anyOf", "oneOf")) or bool(body.get("required")),
        example=None if method == "GET" else {n: v for n, v in example(action).items() if n not in in_path},
        parameters=tuple(parameters),
        problems=(
            *sorted({each.code for each in action.refusals}),
            *(BODY_PROBLEMS if method != "GET" else ()),
            *(("invalid-body",) if method != "GET" else ()),
            "invalid-parameter",
        ),
    )


def schemas() -> dict[str, Any]:
    """The schemas of all actions' bodies and results."""
    every: list[type[Action[Any]]] = [*all_actions(), *REPLAYS, ListEvents]
    actions = [each for each in every if not issubclass(each, Batch) and each.http]
    found = row_schemas(each.row for each in actions)
    for action in actions:
        if action.is_list:
            rows = {action.plural or action.noun(): {"type": "array", "items": reference(action.row.__name__)}}
            page = row_schemas([action.page_type])[action.page_type.__name__]["properties"] if action.key else {}
            found[_plural(action)] = object_schema(rows | {name: page[name] for name in page if name != "rows"})
        if not action.http.startswith("GET"):
            found[action.__name__] = body_of(action)
    return found


def row_schemas(rows: Iterable[type[Any]]) -> dict[str, Any]:
    """The schemas of row types, and of the types in them. Every field is present in a response."""
    rows = list(rows)
    _, found = msgspec.json.schema_components(rows, ref_template="#/components/schemas/{name}")
    for name, each in _instants(rows):  # msgspec states no format for a datetime that may be without a zone
        schema = found[name]["properties"][each]
        next(kind for kind in (schema, *schema.get("anyOf", ())) if kind.get("type") == "string")["format"] = (
            "date-time"
        )
    for schema in found.values():
        schema.pop("title", None)
        if "properties" not in schema:
            continue
        about = schema.get("description", "").partition("\n")[0]
        schema.update(required=list(schema["properties"]), additionalProperties=False, description=about)
        for each in schema["properties"].values():
            each.pop("default", None)
    return dict(found)


def _instants(types: Iterable[Any]) -> Iterator[tuple[str, str]]:
    """The type and the name of each field with an instant, in these types and in the types of their fields."""
    for each in types:
        hints = get_type_hints(each) if is_dataclass(each) else {}
        yield from ((each.__name__, name) for name, hint in hints.items() if datetime in (hint, *get_args(hint)))
        yield from _instants((*hints.values(), *get_args(each)))


def body_of(action: type[Action[Any]]) -> dict[str, Any]:
    in_path = action.path_names()
    fields = {name: each for name, each in action.fields.items() if name not in in_path}
    needs_reason = issubclass(action, Change) and action.needs_reason_over_http()
    optional = [name for name, each in fields.items() if not (each.is_required or (needs_reason and name == "reason"))]
    properties = {name: _schema(each) for name, each in fields.items()}
    schema = object_schema(properties, *optional)
    if action.some_of:
        schema["anyOf"] = bodies_with(action, action.some_of)
    if action.one_of:
        schema["oneOf"] = bodies_with(action, action.one_of)
    if action.not_both:
        schema["not"] = {"allOf": bodies_with(action, action.not_both)}
    return schema


def bodies_with(action: type[Action[Any]], names: Iterable[str]) -> list[dict[str, Any]]:
    """For each field, the schema of the bodies that give it. A flag is given if it is true."""
    are_true = {name: {"properties": {name: {"const": True}}} for name in names if action.fields[name].kind.is_flag}
    return [{"required": [name], **are_true.get(name, {})} for name in names]


def _schema(field: Field) -> dict[str, Any]:
    has_default = not field.is_required and field.default not in (None, "", ())
    default = {"default": field.default} if has_default else {}
    return {**field.kind.schema, "description": field.about, **default}


def _plural(action: type[Action[Any]]) -> str:
    return f"{action.row.__name__}s"


def _split(schema: dict[str, Any]) -> tuple[dict[str, Any], str]:
    return {name: each for name, each in schema.items() if name != "description"}, str(schema["description"])
