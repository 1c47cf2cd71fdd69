"""Whether a request comes from another website or over HTTPS, its cookies, and which address the client has."""

from __future__ import annotations

from ipaddress import IPv6Address, ip_address, ip_network
from typing import Any
from urllib.parse import urlsplit

from starlette.requests import Request

from dispatcher.config.values import LOOPBACKS


def is_cross_site(request: Request, ops_url: str | None) -> bool:
    """Whether another website made the browser send the request, by the rules of Go's `http.CrossOriginProtection`.

    Browsers send `Sec-Fetch-Site` over HTTPS and to the loopback. Without this header, `Origin` must name the host of
    the request, or of DISPATCHER_OPS_URL: a proxy may replace the Host header. A request that has neither header is not
    from a browser.
    """
    site = request.headers.get("sec-fetch-site")
    if site is not None:
        return site not in ("same-origin", "none")
    origin = request.headers.get("origin")
    if origin is None:
        return False
    hosts = {request.headers.get("host", "").lower()}
    if ops_url is not None:
        hosts.add(urlsplit(ops_url).netloc.lower())
    return urlsplit(origin).netloc.lower() not in hosts


def is_secure(request: Request, ops_url: str | None) -> bool:
    """Whether the browser uses HTTPS. A client that forges `X-Forwarded-Proto` affects only its own cookie."""
    if ops_url is not None:
        return urlsplit(ops_url).scheme == "https"
    return request.headers.get("x-forwarded-proto", "").rpartition(",")[2].strip().lower() == "https"


def cookie(name: str, path: str, *, is_https: bool) -> dict[str, Any]:
    """The attributes of a cookie for the pages below `path`, which scripts cannot read.

    Over HTTPS, its name begins with `__Host-`: browsers accept this prefix only from this host, so no other host can
    set the cookie.
    """
    key, path = (f"__Host-{name}", "/") if is_https else (name, path or "/")
    return {"key": key, "path": path, "secure": is_https, "httponly": True}


def is_for_loopback(request: Request) -> bool:
    """Whether the URL in the browser has a host name of the loopback, such as `localhost`."""
    return urlsplit(f"//{request.headers.get('host', '')}").hostname in LOOPBACKS


def client_address(request: Request) -> str:
    """The client's address, for limits: an IPv4 address, or an IPv6 network (/64).

    An IPv6 client can use every address of its network, so a limit must apply to the whole network. If a proxy on this
    host has sent the request, the client's address is the last address in `X-Forwarded-For`, which the proxy has added.
    """
    client = request.scope.get("client")
    address = client[0] if client else ""
    if address in LOOPBACKS:
        # Use the last address. A client can send this header, too, but the proxy adds its own entry after the client's.
        forwarded = request.headers.getlist("x-forwarded-for")
        address = (forwarded[-1].rpartition(",")[2].strip() if forwarded else "") or address
    try:
        parsed = ip_address(address)
    except ValueError:
        return "unknown"
    if isinstance(parsed, IPv6Address):
        return str(parsed.ipv4_mapped or ip_network((parsed, 64), strict=False))
    return str(parsed)
