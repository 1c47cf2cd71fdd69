"""Derives the client's requests from actions (see `dispatcher.actions`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import quote, urlencode

import msgspec
import orjson

from dispatcher.actions.action import Action
from dispatcher.client.calls import ApiCall, ApiResponse
from dispatcher.domain.values import replace

R = TypeVar("R")


def call_of(action: Action[R]) -> ApiCall[R]:
    """The request of an action. Unknown fields in the response are ignored."""
    method, path = action.http.split()
    given = {name: value for name, value in action.values().items() if value is not None}
    for name in action.path_names():
        path = path.replace(f"{{{name}}}", quote(str(given.pop(name)), safe=""))
    if method == "GET":
        texts = {
            name: str(value) if isinstance(value, str) else orjson.dumps(value).decode().strip('"')
            for name, value in given.items()
        }
        return ApiCall(_parser(action), method, path + (f"?{urlencode(texts)}" if texts else ""))
    return ApiCall(_parser(action), method, path, (("Content-Type", "application/json"),), orjson.dumps(given))


def _parser(action: Action[R]) -> Callable[[ApiResponse], Any]:
    def parse(response: ApiResponse) -> Any:
        if not action.is_list:
            return msgspec.json.decode(response.body, type=action.row)
        whole = orjson.loads(response.body)
        rows = msgspec.convert(whole[action.plural or action.subject()], type=list[action.row])  # type: ignore[name-defined]
        return replace(msgspec.convert({**whole, "rows": []}, type=action.page_type), rows=rows) if action.key else rows

    return parse
