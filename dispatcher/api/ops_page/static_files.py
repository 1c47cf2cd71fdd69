"""The page's static files: read once, and served under a path with the hash of their content."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from importlib.resources import files
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

_TYPES: Final = {"css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8", "svg": "image/svg+xml"}


@dataclass(frozen=True, slots=True)
class StaticFile:
    """A static file.

    Attributes:
        path: The path of the file, below `site.path`. The path changes when the content changes, so browsers may keep
            the file for ever.
    """

    path: str
    content: bytes
    media_type: str


@cache
def static_files() -> dict[str, StaticFile]:
    """The style sheets, scripts and icons in the folder `static`, by name. Leaves out other files, such as licences."""
    found = {}
    for resource in files("dispatcher.api.ops_page").joinpath("static").iterdir():
        media_type = _TYPES.get(resource.name.rpartition(".")[2])
        if media_type is not None:
            content = resource.read_bytes()
            digest = sha256(content).hexdigest()[:16]
            found[resource.name] = StaticFile(f"/static/{digest}/{resource.name}", content, media_type)
    return found


async def serve_static(request: Request) -> Response:
    """Serves a static file."""
    found = static_files().get(request.path_params["name"])
    if found is None or request.path_params["digest"] != found.path.split("/")[2]:
        return Response(status_code=404, headers={"Cache-Control": "no-store"})
    headers = {
        "Cache-Control": "public, max-age=31536000, immutable",
        "Cross-Origin-Resource-Policy": "same-origin",
        "X-Content-Type-Options": "nosniff",
    }
    return Response(found.content, headers=headers, media_type=found.media_type)
