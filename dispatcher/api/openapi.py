"""The OpenAPI 3.1 document of the HTTP API: all operations and the schemas that they refer to."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Final

from dispatcher.api import (
    batch_face,
    email_schema,
    enqueue_operations,
    event_operations,
    face,
    feed_endpoints,
    operation,
    status_operations,
)
from dispatcher.api.operation import Operation
from dispatcher.version import VERSION

Described = tuple[str, str, Operation]
"""The method, the path and the description of an operation."""

_ABOUT: Final = (
    "Stores emails durably, one per message key, and reports their status. `dispatcher run` sends them. Every error "
    "response is a problem document (RFC 9457): `code` identifies the problem, `errors` locates each mistake in the "
    "request."
)
_SCHEMAS: Final[dict[str, Any]] = {
    **email_schema.SCHEMAS,
    **enqueue_operations.SCHEMAS,
    **status_operations.SCHEMAS,
    **feed_endpoints.SCHEMAS,
    **event_operations.SCHEMAS,
    **operation.SCHEMAS,
}


def document(operations: Iterable[Described], *, needs_key: bool) -> dict[str, Any]:
    """The OpenAPI document of the operations.

    Args:
        needs_key: Whether requests need an API key.
    """
    paths: dict[str, dict[str, Any]] = {}
    for method, path, described in operations:
        # A path of Starlette can name a converter, such as `{email_id:uuid}`; a path of OpenAPI cannot.
        paths.setdefault(re.sub(r":\w+}", "}", path), {})[method.lower()] = described.document()
    whole: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "Email Dispatcher", "description": _ABOUT, "version": VERSION},
        "paths": paths,
        "components": {"schemas": {**_SCHEMAS, **face.schemas(), **batch_face.schemas()}},
    }
    if needs_key:
        description = "An API key from `dispatcher keys create`, sent as `Authorization: Bearer …`."
        scheme = {"type": "http", "scheme": "bearer", "description": description}
        whole["components"]["securitySchemes"] = {"key": scheme}
        whole["security"] = [{"key": []}]
    return whole
