"""Hostile requests get a 4xx with the reason. The API stores and repeats no part of such a request."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from typing import Any, Final

import orjson
import psycopg
import pytest

from dispatcher.admission.problems import Problem
from dispatcher.api.http_protocol import MAX_HEAD_BYTES
from dispatcher.api.large_json import MAX_VALUES
from dispatcher.config import Settings
from dispatcher.errors import InvalidEmail
from tests.abuse import framings
from tests.abuse.case import Target
from tests.abuse.raw_connection import JSON, exchange, get, head, provoke
from tests.api.running_api import EMAIL, Api, make_key, running
from tests.mime_corpus import ics
from tests.waiting import DEADLINE_SECONDS, until

FILE: Final = {"filename": "a.pdf", "content_type": "application/pdf", "content": "JVBERg=="}
HEALTH: Final = get("/healthz")
INVALID, NOT_ALLOWED = "invalid-email", "email-not-allowed"


def request(*headers: str, path: str = "/v1/emails") -> bytes:
    return head(f"POST {path}", JSON, "Idempotency-Key: k", *headers)


def with_file(name: str, **more: Any) -> dict[str, Any]:
    return {"attachments": [FILE | {"filename": name} | more]}


REFUSED: Final[dict[str, tuple[dict[str, Any], str, str]]] = {
    "recipient in a header": ({"headers": {"Bcc": "eve@example.net"}}, INVALID, "#/headers/Bcc"),
    "header that is not allowed": ({"headers": {"Foo": "x"}}, NOT_ALLOWED, "#/headers/Foo"),
    "command to a provider": ({"headers": {"X-MC-Subaccount": "x"}}, INVALID, "#/headers/X-MC-Subaccount"),
    "header injected by a value": ({"headers": {"X-A": "x\r\nBcc: e@e.example"}}, INVALID, "#/headers/X-A"),
    "header injected by a name": ({"headers": {"X-A\r\nBcc": "x"}}, INVALID, "#/headers/X-A??Bcc"),
    "header injected by the sender": ({"from": "a@b.example\r\nBcc: e@e.example"}, INVALID, "#/from"),
    "SMTP command in an address": ({"to": ["a@example.org>\r\nRCPT TO:<e@e.example"]}, INVALID, "#/to/0"),
    "another key in the body": ({"message_key": "other"}, INVALID, "#/message_key"),
    "too many recipients": ({"to": [f"a{n}@example.org" for n in range(51)]}, NOT_ALLOWED, "#/to"),
    "far too many recipients": ({"to": ["a@example.org"] * 2000}, INVALID, "#/to"),
    "NUL in the body": ({"text": "a\0b"}, INVALID, "#/text"),
    **{
        f"attached program {name!r}": (with_file(name), NOT_ALLOWED, "#/attachments/0/filename")
        for name in (
            *("a.pdf.exe", "a.{3050f4d8-98b5-11cf-bb82-00aa00bdce0b}", "a.reg", "a.url", "a.application", "a.img"),
            *("a.one", "a.appref-ms", "a.vhdx", "a.jnlp"),
        )
    },
    **{
        f"program by its type {kind}": (
            with_file("a.pdf", content_type=kind),
            NOT_ALLOWED,
            "#/attachments/0/content_type",
        )
        for kind in ("text/JavaScript", "application/x-msdownload")
    },
    "path in a filename": (with_file("../../etc/passwd"), INVALID, "#/attachments/0/filename"),
    "content that is not base64": (with_file("a.pdf", content="%%%"), INVALID, "#/attachments/0/content"),
    "too many attachments": ({"attachments": [FILE] * 21}, NOT_ALLOWED, "#/attachments"),
    "content id that the HTML does not show": (
        with_file("a.png", content_id="a"),
        INVALID,
        "#/attachments/0/content_id",
    ),
    "content id with a header": (with_file("a.png", content_id="a>\r\nX: y"), INVALID, "#/attachments/0/content_id"),
    "calendar with a header in its method": (
        {"calendar": {"content": ics(), "method": "REQUEST\r\nX: y"}},
        INVALID,
        "#/calendar/method",
    ),
    "raw beside other content": ({"raw": "eA=="}, INVALID, "#/from"),
    "unknown field": ({"send_at": "now"}, INVALID, "#/send_at"),
}


async def test_a_hostile_email_is_refused_and_the_field_is_named(api: Api, connection: psycopg.Connection) -> None:
    for name, (fields, code, pointer) in REFUSED.items():
        answer = await api.post("k", EMAIL | fields)
        assert (answer.status, answer.code, answer.pointers) == (422, code, [pointer]), name

    assert connection.execute("select count(*) from email_idempotency").fetchone() == (0,)


async def test_all_mistakes_of_an_email_and_of_a_batch_are_named_at_once(api: Api) -> None:
    wrong = EMAIL | {"from": "shop", "to": ["ann", "bob@example.org"], "lane": "slow", "a/b.c": 1}
    forbidden = EMAIL | {"attachments": [FILE | {"filename": "a.exe"}] * 2}
    batch = {"emails": [{**wrong, "message_key": f"k-{number}"} for number in range(300)]}

    assert (await api.post("k", wrong)).pointers == ["#/from", "#/to/0", "#/a~1b.c", "#/lane"]
    refused = await api.post("k", forbidden)
    assert (refused.code, refused.pointers) == (NOT_ALLOWED, [f"#/attachments/{at}/filename" for at in (0, 1)])
    results = (await api.call("POST", "/v1/emails/batch", body=batch)).json["results"]
    assert [len(each["problem"]["errors"]) for each in results] == [4] * 50 + [1] * 250
    extra = await api.call("POST", "/v1/emails/batch", body={"emails": [], "mails": []})
    assert extra.json["errors"] == [{"pointer": "#/mails", "detail": "is unknown; did you mean emails?"}]


async def test_an_email_that_no_configured_provider_can_send_is_refused_and_the_response_says_what_it_needs(
    settings: Settings, connection: psycopg.Connection
) -> None:
    templated = {"template_id": "d-1", "text": None}
    async with running(replace(settings, providers=("smtp",))) as api:
        answer = await api.post("k-1", EMAIL | templated)
        batch = {"emails": [EMAIL | {"message_key": "k-2"}, EMAIL | templated | {"message_key": "k-3"}]}
        several = await api.call("POST", "/v1/emails/batch", body=batch)

    assert (answer.status, answer.code, answer.pointers) == (422, "no-capable-provider", ["#/template_id"])
    assert answer.json["detail"] == (
        "template_id needs a provider with templates (resend, sendgrid, ses); configured: smtp. "
        "Add one to DISPATCHER_PROVIDERS, or set text or html."
    )
    accepted, refused = several.json["results"]
    assert (accepted["outcome"], refused["problem"]["code"]) == ("accepted", "no-capable-provider")
    assert connection.execute("select count(*) from email_idempotency").fetchone() == (1,)


async def test_templates_and_allowed_headers_of_a_provider_are_accepted(settings: Settings) -> None:
    async with running(replace(settings, allowed_provider_headers=("x-mc-tags",))) as api:
        allowed = await api.post("k-1", EMAIL | {"headers": {"X-MC-Tags": "receipt"}})
        others = await api.post("k-2", EMAIL | {"headers": {"X-MC-Subaccount": "x"}})
        # The API does not know the providers.
        template = await api.post("k-3", EMAIL | {"template_id": "d-1", "text": None})

    assert (allowed.status, others.status, template.status) == (202, 422, 202)


NAMED_TWICE: Final = (
    b'{"from": "shop@example.com", "from": "eve@example.net"}',
    b'{"from": "shop@example.com", "fr\\u006fm": "eve@example.net"}',
    b'{"template_data": {"a": [{"b": 1, "b" : 2}]}}',
    b'{"a\\\\": 1, "text": "x\\": y", "text": ""}',
    b'{"headers": {"": "", "": ""}}',
)


NO_JSON: Final = (b"", b"{", b"nul", b"\xff", b'{"a":1}{', b"[" * 100_000, b'{"a":' * 5000, b'{"from": NaN}')
MEDIA: Final = (
    *({"Content-Type": name} for name in ("text/plain", "multipart/form-data; boundary=x", "application/xml")),
    {"Content-Type": "application/x-www-form-urlencoded"},
    {"Content-Type": "application/json; charset=utf-16"},
    {"Content-Encoding": "gzip"},
)


async def test_a_body_that_is_not_json_or_has_too_many_values_is_refused(api: Api) -> None:
    for raw in (*NO_JSON, *NAMED_TWICE):
        answer = await api.post(raw=raw)
        assert (answer.status, answer.code) == (400, "malformed-json"), raw[:10]
    for raw in (b"[]", b"17", b'"text"', b"null"):
        answer = await api.post(raw=raw)
        assert (answer.status, answer.code) == (422, "invalid-email"), raw
    for raw in (b"[" + b"{}," * MAX_VALUES + b"{}]", b"[" * 2 * MAX_VALUES):
        answer = await api.post(raw=raw)
        assert (answer.status, answer.code) == (413, "body-too-large"), raw[:4]
    assert (await api.post("k-1", EMAIL | {"text": '{[,:"\\' * MAX_VALUES})).status == 202
    for headers in MEDIA:
        answer = await api.post(headers=headers)
        assert (answer.status, answer.code) == (415, "unsupported-media-type"), headers


async def test_a_body_that_is_too_large_is_refused_without_being_read(settings: Settings) -> None:
    async with running(replace(settings, api_max_body_bytes=10_000)) as api:
        announced = await provoke(api.port, [request("Content-Length: 10000000000")])
        chunk = b"1000\r\n" + b" " * 4096 + b"\r\n"
        streamed = await provoke(api.port, [request("Transfer-Encoding: chunked"), *[chunk] * 5])

    assert announced == streamed == "413 body-too-large + end"


async def test_a_client_that_never_stops_sending_after_a_refusal_is_disconnected(api: Api) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", api.port)
    writer.write(request("Content-Length: 100000000000", path="/v1/replays"))

    async def send_for_ever() -> None:
        async with asyncio.timeout(DEADLINE_SECONDS):
            while True:
                writer.write(b"x" * 4096)
                await writer.drain()
                await asyncio.sleep(0)

    with pytest.raises(ConnectionError):
        await send_for_ever()


async def test_a_refusal_is_never_sent_as_the_response_to_an_earlier_request(api: Api) -> None:
    for sent in (*framings.TARGETS.values(), b"nonsense\r\n\r\n", HEALTH + b"nonsense\r\n\r\n"):
        assert await exchange(api.port, [HEALTH + sent]) in ("end", "reset")


async def test_odd_framings_are_refused_or_harmless(settings: Settings, connection: psycopg.Connection) -> None:
    keys = {scope: make_key(connection, scopes=[scope]) for scope in ("send", "read")}
    async with running(settings) as api:
        target = Target(api.port, keys, seconds=0.0)

        for case in framings.CASES:
            assert set(await case.attack(target)) <= case.allowed, case.id


async def test_empty_lines_after_a_response_do_not_keep_the_connection_open(settings: Settings) -> None:
    async with running(replace(settings, api_head_seconds=0.3)) as api:
        reader, writer = await asyncio.open_connection("127.0.0.1", api.port)
        writer.write(HEALTH)
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.write(b"\r\n")
        async with asyncio.timeout(DEADLINE_SECONDS):
            rest = await reader.read()
        writer.close()

    assert b"HTTP/1.1 408" in rest


async def test_a_client_that_sends_its_request_too_slowly_gets_408(settings: Settings) -> None:
    stalled = request("Content-Length: 50") + b'{"from":'
    async with (
        running(replace(settings, api_head_seconds=1.5, api_request_seconds=1.5)) as api,
        running(replace(settings, api_head_seconds=0.5, api_request_seconds=600)) as other,
    ):
        answers = await asyncio.gather(
            exchange(api.port, [b"POST /v1/emails HTTP/1.1\r\nHost: 127.0"]),
            exchange(api.port, [stalled]),
            exchange(other.port, [stalled]),  # long before the request's timeout
            exchange(api.port, []),
            exchange(api.port, [HEALTH, b"GET / HT"]),
        )

    assert [*answers] == [*["408 request-timeout"] * 3, "end", "200"]


async def test_a_client_that_pipelines_too_many_requests_is_disconnected(api: Api) -> None:
    flood = HEALTH * 1000
    flooding = [await asyncio.open_connection("127.0.0.1", api.port) for _ in range(20)]
    for _, writer in flooding:
        writer.write(flood)

    ended = await asyncio.gather(*(reader.read() for reader, _ in flooding), return_exceptions=True)

    for _, writer in flooding:
        writer.close()
    assert all(not isinstance(end, bytes) or end.count(b"HTTP/1.1") < 1000 for end in ended), ended
    assert (await api.get("/healthz")).status == 200


async def test_a_few_pipelined_requests_are_answered_in_order(api: Api) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", api.port)
    writer.write(HEALTH * 9 + get("/nowhere", "Connection: close"))

    answers = (await reader.read()).split(b"HTTP/1.1 ")[1:]

    writer.close()
    assert [answer[:3] for answer in answers] == [b"200"] * 9 + [b"404"]


async def test_the_limit_of_a_head_is_exact_although_the_head_arrives_at_once(api: Api) -> None:
    before = b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\nX-Filler: "

    for octets, answer in ((MAX_HEAD_BYTES, "200"), (MAX_HEAD_BYTES + 1, "431 headers-too-large")):
        assert await exchange(api.port, [before + b"x" * (octets - len(before) - 4) + b"\r\n\r\n"]) == answer


async def test_a_body_in_thousands_of_tiny_chunks_is_refused(api: Api) -> None:
    head = request("Transfer-Encoding: chunked")
    piece, end, large = b"1\r\n{\r\n", b"0\r\n\r\n", b"%x\r\n" % 600_000 + b" " * 600_000 + b"\r\n"

    for few in (head + piece * 4000, head + large + piece * 10_000):
        assert await exchange(api.port, [few + end]) == "400 malformed-json"
    assert await exchange(api.port, [head + piece * 10_000]) == "400 malformed-request"


def upload(token: str, body: bytes, length: int) -> bytes:
    return request(f"Authorization: Bearer {token}", f"Content-Length: {length}") + body


@asynccontextmanager
async def stalled_clients(api: Api, count: int, sent: bytes) -> AsyncIterator[list[asyncio.StreamReader]]:
    """Opens connections, each of which sends these bytes and then nothing, during the block."""
    clients = [await asyncio.open_connection("127.0.0.1", api.port) for _ in range(count)]
    for _, writer in clients:
        writer.write(sent)
    try:
        yield [reader for reader, _ in clients]
    finally:
        for _, writer in clients:
            writer.close()


async def test_stalled_uploads_take_no_slots(settings: Settings, connection: psycopg.Connection) -> None:
    token, other = make_key(connection), make_key(connection)
    async with (
        running(replace(settings, api_max_concurrent_requests=4)) as api,
        stalled_clients(api, 30, upload(token, b"{", 50)),
    ):
        for _ in range(3):
            assert (await api.get("/healthz")).status == 200
            assert (await api.post("k-1", token=other)).status == 202
            assert (await api.post("k-1", token=token)).status == 202


async def test_bodies_of_one_key_leave_memory_to_other_keys(settings: Settings, connection: psycopg.Connection) -> None:
    token, other = make_key(connection), make_key(connection)
    bounded = replace(settings, api_max_body_bytes=100_000, api_memory_bytes=400_000)
    large = upload(token, b" " * 90_000, 100_000)
    async with running(bounded) as api, stalled_clients(api, 4, large) as readers:
        refused = [asyncio.create_task(reader.readline()) for reader in readers]
        done, waiting = await asyncio.wait(refused, return_when=asyncio.FIRST_COMPLETED)
        while len(done) < 2:
            done, waiting = await asyncio.wait(refused, timeout=0.1)

        assert {task.result() for task in done} == {b"HTTP/1.1 503 Service Unavailable\r\n"}
        assert (await api.post("k-1", token=token, raw=b"{" + b" " * 90_000)).status == 503
        assert (await api.post("k-1", token=other, raw=b"{" + b" " * 90_000)).status == 400
        for task in waiting:
            task.cancel()


async def test_a_long_body_that_arrives_fast_enough_is_read(settings: Settings) -> None:
    async with running(replace(settings, api_head_seconds=0.2, api_request_seconds=600)) as api:
        reader, writer = await asyncio.open_connection("127.0.0.1", api.port)
        loop = asyncio.get_running_loop()
        body, until = orjson.dumps(EMAIL), loop.time() + 0.5
        writer.write(request("Transfer-Encoding: chunked"))
        while loop.time() < until:
            writer.write(b"40\r\n" + b" " * 64 + b"\r\n")
            await writer.drain()
            await asyncio.sleep(0)  # lets the API read the request
        writer.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))
        answer = await reader.readline()
        writer.close()

    assert answer.startswith(b"HTTP/1.1 202")


async def test_a_refused_request_leaves_no_reference_cycles(api: Api) -> None:
    """A reference cycle would keep the request's body, up to 40 MB, until the garbage collector runs."""
    with without_collector():
        for path, body, status in (
            ("/v1/emails", b"{", 400),
            ("/v1/emails", orjson.dumps(EMAIL | {"text": "a" * 100_000, "tags": 1}), 422),
            ("/v1/emails", b" " * 50_000_000, 413),
            ("/v1/emails/batch", orjson.dumps({"emails": [EMAIL | {"message_key": "k", "to": 1}, EMAIL, 1]}), 200),
            ("/v1/replays", b"[]", 422),
            ("/v1/nothing", b"{}", 404),
        ):
            assert (await api.call("POST", path, key="k", raw=body)).status == status
            await until(lambda: not any(isinstance(each, (Problem, InvalidEmail)) for each in gc.get_objects()))


@contextmanager
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
