"""The OpenAPI 3.1 document of the HTTP API: all operations and the schemas that they refer to."""

from __future__ import annotations

from typing import Any, Final

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from dispatcher.api import (
    batch_face,
    email_schema,
    enqueue_operations,
    event_operations,
    face,
    feed_operations,
    operation,
    operator_operations,
    pause_operations,
    status_operations,
    suppression_operations,
    webhook_operations,
)

ABOUT: Final = (
    "Stores emails durably, one per message key, and reports their status. `dispatcher run` sends them. Every error "
    "response is a problem document (RFC 9457): `code` identifies the problem, `errors` locates each mistake in the "
    "request."
)
_SCHEMAS: Final[dict[str, Any]] = {
    **email_schema.SCHEMAS,
    **enqueue_operations.SCHEMAS,
    **status_operations.SCHEMAS,
    **operator_operations.SCHEMAS,
    **feed_operations.SCHEMAS,
    **webhook_operations.SCHEMAS,
    **event_operations.SCHEMAS,
    **suppression_operations.SCHEMAS,
    **pause_operations.SCHEMAS,
    **operation.SCHEMAS,
}


def document(app: FastAPI, *, needs_key: bool) -> dict[str, Any]:
    """The OpenAPI document of the application.

    Args:
        needs_key: Whether requests need an API key.
    """
    whole: dict[str, Any] = get_openapi(
        title=app.title, version=app.version, description=app.description, routes=app.routes, openapi_version="3.1.0"
    )
    components = whole.setdefault("components", {})
    components["schemas"] = {**_SCHEMAS, **face.schemas(), **batch_face.schemas()}
    if needs_key:
        description = "An API key from `dispatcher keys create`, sent as `Authorization: Bearer …`."
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer", "description": description}}
        whole["security"] = [{"key": []}]
    return whole
