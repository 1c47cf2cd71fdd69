"""However an HTTP call ends, the server gets at most one POST, and the call has the right result."""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Final

import httptools
import orjson
import pytest
import uvloop

from dispatcher.dev.http_behaviour import Behaviour, Fault
from dispatcher.dev.http_double import HttpDouble, running_double
from dispatcher.domain.outcome import Concern, Reason
from dispatcher.providers.contract import NoFreeConnection
from dispatcher.transport.http import HttpTransport
from dispatcher.transport.http_connection import MAX_RESPONSE_OCTETS, HttpConnection
from dispatcher.transport.http_response import HttpResponse, NoResponse, RequestNotSent
from dispatcher.transport.tls import Tls
from tests.providers.conftest import Authority
from tests.providers.emails import LATER_SECONDS as LATER
from tests.providers.emails import PATIENCE_SECONDS as PATIENCE
from tests.providers.emails import Sending
from tests.providers.listeners import Handler, close_at_once, listening, stay_silent
from tests.waiting import Overtime, until, wait_until

SOON: Final = 0.4
KEY: Final = {"Authorization": "Bearer secret-key"}
ACCEPTED: Final = b"HTTP/1.1 202 Accepted\r\nX-Message-Id: %s\r\nContent-Length: 0\r\n\r\n"


@pytest.fixture
async def double(tmp_path: Path, authority: Authority) -> AsyncIterator[HttpDouble]:
    async with running_double(tmp_path, tls=authority.server) as running:
        yield running


@pytest.fixture
async def transport(authority: Authority) -> AsyncIterator[HttpTransport]:
    """A transport with at most one connection, which trusts the double's certificate."""
    opened = HttpTransport(connections=1, ca_file=authority.ca_file)
    yield opened
    await opened.close()


class Call:
    """One POST and its result, `end`. `left`: how often `mark_on_wire` was called."""

    def __init__(self, transport: HttpTransport, url: str, email_id: str = "one", *, text: str = "") -> None:
        self._transport = transport
        self._url = f"{url}/v3/mail/send"
        people = [{"to": [{"email": "ann@example.com"}], "custom_args": {"email_id": email_id}}]
        self._body = orjson.dumps({"personalizations": people, "text": text})
        self.left = 0
        self.end: HttpResponse | RequestNotSent | NoResponse | None = None

    async def run(self, seconds: float = PATIENCE) -> Call:
        attempt = Sending(seconds)
        overtime = Overtime(attempt.deadline)
        try:
            self.end = await self._transport.post(self._url, KEY, self._body, attempt)
        except (RequestNotSent, NoResponse) as error:
            self.end = error
        self.left = attempt.left
        assert overtime.end() < 1
        return self

    async def run_past_mark_on_wire(self, seconds: float) -> Call:
        """Make the call with a deadline that must pass after the body was sent. If the deadline passes earlier, repeat
        the call with a later deadline."""
        while not (await self.run(seconds)).left and seconds < PATIENCE:
            assert isinstance(self.end, RequestNotSent)
            assert self.end.reason is Reason.TIMEOUT_BEFORE_SEND
            seconds *= 4
        return self

    def begin(self) -> asyncio.Future[HttpResponse | NoResponse] | None:
        return self._transport.begin(self._url, KEY, self._body, Sending(), lambda result: result)

    def response(self) -> HttpResponse:
        assert isinstance(self.end, HttpResponse)
        return self.end

    def not_sent(self, reason: Reason = Reason.CONNECTION_FAILED) -> RequestNotSent:
        """The definite failure, for this reason, of a call that did not leave."""
        assert isinstance(self.end, RequestNotSent)
        assert (self.end.reason, self.left) == (reason, 0)
        return self.end


@pytest.mark.parametrize("tls", [True, False], ids=["tls", "clear"])
@pytest.mark.parametrize(
    ("act", "words", "status", "whole"),
    [
        (Fault.CLOSE_UNREAD, "no response", None, 0),
        (Fault.RESET_UNREAD, "no response", None, 0),
        (Fault.FORGET, "closed", None, 1),
        (Fault.CLOSE, "closed", None, 1),
        (Fault.RESET, "reset", None, 1),
        (Fault.HANG, "deadline", None, 1),
        (Fault.DRIP, "deadline", None, 1),
        (Fault.DRIP_BODY, "incomplete at the deadline", 202, 1),
        (Fault.HALF, "was cut off", 202, 1),
        (Fault.HALF_HEAD, "closed", None, 1),
        (Fault.GARBAGE, "not HTTP", None, 1),
    ],
)
async def test_silence_after_the_body_was_sent_is_no_response_and_does_not_affect_the_next_call(
    act: Fault, words: str, status: int | None, whole: int, tls: bool,
    authority: Authority, transport: HttpTransport, tmp_path: Path,
) -> None:  # fmt: skip
    async with running_double(tmp_path, Behaviour(act), tls=authority.server if tls else None) as double:
        seconds = {Fault.HANG: SOON, Fault.DRIP: SOON, Fault.DRIP_BODY: LATER}.get(act, PATIENCE)
        call = await Call(transport, double.url).run_past_mark_on_wire(seconds)

        assert isinstance(call.end, NoResponse)
        assert words in call.end.detail
        assert (call.end.status, call.left) == (status, 1)
        await until(lambda: double.requests.total() == whole)  # the double may still read after the deadline
        assert double.begun.total() == 1
        double.behaviour = Behaviour()
        (await Call(transport, double.url, "second").run()).response()
        assert double.requests["second"] == 1


@pytest.mark.parametrize("act", [Fault.CLOSE_UNREAD, Fault.RESET_UNREAD])
async def test_a_large_body_that_is_cut_off_is_a_definite_failure(
    act: Fault, double: HttpDouble, transport: HttpTransport
) -> None:
    double.behaviour.fault = act

    call = await Call(transport, double.url, text="x" * 20_000_000).run()

    assert "before the end of the body" in call.not_sent().detail
    # The server may always cut off this body, and no other.
    assert call.not_sent().outcome.concern is Concern.EITHER


async def test_a_large_body_that_the_server_does_not_read_is_a_definite_failure(transport: HttpTransport) -> None:
    with _never_accepting() as listening:
        call = Call(transport, _url_of(listening, "http"), text="x" * 20_000_000)
        await call.run(4 * SOON)  # writing the body into the buffers also takes time

    assert "did not read" in call.not_sent(Reason.TIMEOUT_BEFORE_SEND).detail


async def test_a_large_body_is_not_given_up_at_the_previous_calls_deadline(transport: HttpTransport) -> None:
    """All calls of a connection share one timer. So the deadline of the previous call may pass while the next body is
    sent."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + LATER

    async def take_the_second_slowly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for is_second in (False, True):
            length = int((await reader.readuntil(b"\r\n\r\n")).rpartition(b"Content-Length: ")[2])
            if is_second:
                await until(lambda: loop.time() > deadline + 0.1)
            await reader.readexactly(length)
            writer.write(b"HTTP/1.1 202 Accepted\r\nContent-Length: 0\r\n\r\n")

    async with listening(take_the_second_slowly) as port:
        # On a very slow machine, the second call may use a new connection with its own timer.
        await Call(transport, f"http://127.0.0.1:{port}").run(LATER)
        second = await Call(transport, f"http://127.0.0.1:{port}", text="x" * 16 * 1024 * 1024).run()

    second.response()


async def test_only_the_beginning_of_an_endless_response_is_kept(double: HttpDouble, transport: HttpTransport) -> None:
    double.behaviour.fault = Fault.FLOOD

    call = await Call(transport, double.url).run()

    assert (call.response().status, len(call.response().body)) == (202, MAX_RESPONSE_OCTETS)


@pytest.mark.parametrize("seconds", [PATIENCE, SOON], ids=["connect timeout", "deadline"])
async def test_a_hanging_connection_attempt_is_a_definite_failure(seconds: float, authority: Authority) -> None:
    transport = HttpTransport(connections=1, ca_file=authority.ca_file, connect_seconds=2 * SOON)
    with _never_accepting() as listening:
        call = await Call(transport, _url_of(listening)).run(seconds)

    expected = Reason.TIMEOUT_BEFORE_SEND if seconds == SOON else Reason.CONNECTION_FAILED
    assert call.not_sent(expected).outcome.concern is Concern.PROVIDER


async def test_a_server_without_tls_is_a_definite_failure(transport: HttpTransport) -> None:
    async with listening(close_at_once) as port:
        call = await Call(transport, f"https://127.0.0.1:{port}").run()

    call.not_sent()


@pytest.mark.parametrize("step", ["mark_on_wire", "connection_acquired"])
async def test_a_worker_can_refuse_before_the_first_byte_and_the_connection_is_free_again(
    step: str, double: HttpDouble, transport: HttpTransport
) -> None:
    class TooLate(Exception):
        pass

    def refuse() -> float:
        raise TooLate

    attempt = Sending(leave=refuse) if step == "mark_on_wire" else Sending(admission=refuse)
    with pytest.raises(TooLate):
        await transport.post(f"{double.url}/v3/mail/send", KEY, b"{}", attempt)

    assert double.requests.total() == 0
    (await Call(transport, double.url).run()).response()


async def test_the_deadline_restarts_when_a_connection_is_acquired() -> None:
    loop = asyncio.get_running_loop()
    began_at = loop.time()
    transport = HttpTransport(connections=1)
    attempt = Sending(admission=lambda: loop.time() + SOON)
    async with listening(stay_silent) as port:
        first = asyncio.create_task(Call(transport, f"http://127.0.0.1:{port}").run(SOON))
        await asyncio.sleep(0)
        with pytest.raises((NoResponse, RequestNotSent), match="before the deadline"):
            await transport.post(f"http://127.0.0.1:{port}", KEY, b"{}", attempt)
        await first

    assert loop.time() < began_at + PATIENCE / 2


async def test_a_call_cancelled_in_the_queue_or_before_its_connection_opens_posts_nothing(
    double: HttpDouble, transport: HttpTransport
) -> None:
    tasks = [asyncio.create_task(Call(transport, double.url, str(number)).run()) for number in range(2)]
    for _ in range(2):
        await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

    (await Call(transport, double.url).run()).response()
    assert double.begun.total() == 1


@pytest.mark.parametrize(
    ("answer", "status", "body"),
    [
        (b"HTTP/1.1 202 Accepted\r\n\r\nup to the end", 202, b"up to the end"),
        (b"HTTP/1.1 400 No\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n", 400, b"abc"),
        (b"HTTP/1.1 204 None\r\n\r\n", 204, b""),
        (b"HTTP/1.1 202 Accepted\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nab", 202, None),
        (b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: h2c\r\nConnection: Upgrade\r\n\r\n", None, None),
        (b"HTTP/1.1 202 Accepted\r\n" + b"X-Filler: y\r\n" * 10_000 + b"\r\n", None, None),
    ],
    ids=["until the end", "chunks", "no body", "broken chunks", "another protocol", "long head"],
)
async def test_a_response_ends_as_http_defines_and_an_incomplete_or_invalid_one_is_no_response(
    answer: bytes, status: int | None, body: bytes | None, transport: HttpTransport
) -> None:
    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(4096)
        writer.write(answer)

    async with listening(say) as port:
        call = await Call(transport, f"http://127.0.0.1:{port}").run(PATIENCE)

    assert call.left == 1
    assert isinstance(call.end, NoResponse if body is None else HttpResponse)
    assert (call.end.status, getattr(call.end, "body", None)) == (status, body)


async def test_a_call_that_begins_without_a_task_takes_a_connection_until_it_ends(
    double: HttpDouble, transport: HttpTransport
) -> None:
    await Call(transport, double.url, "first").run()
    double.behaviour.fault = Fault.HANG

    begun = Call(transport, double.url, "begun").begin()

    assert begun is not None
    with pytest.raises(NoFreeConnection):
        await Call(transport, double.url, "second").run(SOON)
    double.behaviour.fault = None
    double.drop_connections()
    assert isinstance(await begun, NoResponse)
    (await Call(transport, double.url, "third").run()).response()


async def test_an_idle_connection_that_the_server_closed_causes_no_second_post(
    double: HttpDouble, transport: HttpTransport
) -> None:
    """The server closes the connection after each response without notice. The next call may use the connection before
    it has read the close."""
    double.behaviour.fault = Fault.LAST_ANSWER

    calls = [await Call(transport, double.url, str(number)).run() for number in range(20)]

    answered = sum(isinstance(call.end, HttpResponse) for call in calls)
    unknown = sum(isinstance(call.end, NoResponse) for call in calls)
    assert answered + unknown == 20
    assert max(double.requests.values()) == 1
    assert answered <= double.requests.total() <= 20


async def test_an_idle_connection_is_replaced_if_the_loop_has_not_yet_read_that_the_server_closed_it(
    transport: HttpTransport,
) -> None:
    may_close = threading.Event()

    def serve(listener: socket.socket) -> None:
        for _ in range(2):
            plain, _ = listener.accept()
            with plain:
                plain.recv(65536)
                plain.sendall(ACCEPTED % b"x")
                assert may_close.wait(PATIENCE)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(PATIENCE)
        serving = asyncio.create_task(asyncio.to_thread(serve, listener))
        url = _url_of(listener, "http")
        (await Call(transport, url).run()).response()
        may_close.set()
        wait_until(lambda: not transport.idle[0].is_reusable)  # the loop reads nothing meanwhile

        (await Call(transport, url).run()).response()
        await serving


def _url_of(listening: socket.socket, scheme: str = "https") -> str:
    return f"{scheme}://127.0.0.1:{listening.getsockname()[1]}"


@contextmanager
def _never_accepting() -> Iterator[socket.socket]:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(8)
        listening.setblocking(False)
        yield listening


@pytest.mark.parametrize("act", [None, Fault.CLOSE], ids=["ended by us", "ended by the server"])
def test_a_closed_connection_is_freed_without_the_garbage_collector(
    tmp_path: Path, authority: Authority, act: Fault | None
) -> None:
    """In a quiet worker, the garbage collector runs once an hour. Until then, each closed connection would keep TLS's
    buffers in memory."""

    async def use_and_end() -> None:
        async with running_double(tmp_path, Behaviour(fault=act), tls=authority.server) as double:
            transport = HttpTransport(connections=8, ca_file=authority.ca_file)
            for number in range(3):
                call = Call(transport, double.url, str(number))
                await call.run()
                call.end = None  # an exception keeps its frames, and they keep the connection
            await transport.close()
            ours = (HttpConnection, Tls, httptools.HttpResponseParser)
            await until(lambda: not any(type(each) in ours for each in gc.get_objects()))

    gc.collect()
    gc.disable()
    try:
        uvloop.run(use_and_end())
    finally:
        gc.enable()


HINTS: Final = b"HTTP/1.1 103 Early Hints\r\nX-Message-Id: hint\r\nLink: </a>\r\n\r\n"


@asynccontextmanager
async def _open_server(serve: Handler) -> AsyncIterator[str]:
    """Run a server that keeps its connections open until the end of the block; yields the URL."""
    over = asyncio.Event()

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await serve(reader, writer)
        await over.wait()

    async with listening(listen) as port:
        yield f"http://127.0.0.1:{port}"
        over.set()


async def _request(reader: asyncio.StreamReader) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    await reader.readexactly(int(head.rpartition(b":")[2]))


@pytest.mark.parametrize("octets", [1, 20, 60, 1000])
async def test_an_unrequested_response_is_not_taken_for_the_next_one(octets: int, transport: HttpTransport) -> None:
    """The server begins an unrequested response right after the first response. It ends this response at once, or after
    it has read the next request."""
    unasked = ACCEPTED % b"unasked"
    connections: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(b"connection-%d" % (len(connections) + 1))
        await _request(reader)
        writer.write(ACCEPTED % connections[-1] + unasked[:octets])
        await _request(reader)
        writer.write(unasked[octets:])

    async with _open_server(serve) as url:
        ends = [(await Call(transport, url).run()).response() for _ in range(3)]

    assert [end.headers["x-message-id"] for end in ends] == ["connection-1", "connection-2", "connection-3"]


async def test_interim_responses_are_ignored_and_the_connection_is_reused(transport: HttpTransport) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for number in range(3):
            await _request(reader)
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n" + HINTS + ACCEPTED % b"%d" % number)

    async with _open_server(serve) as url:
        ends = [(await Call(transport, url).run()).response() for _ in range(3)]

    assert [end.headers for end in ends] == [{"x-message-id": each, "content-length": "0"} for each in "012"]
    assert {end.status for end in ends} == {202}


async def test_responses_to_half_a_large_body_count_even_if_the_server_stops_reading(
    transport: HttpTransport,
) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\n\r\n{}")

    began_at = asyncio.get_running_loop().time()
    async with _open_server(serve) as url:
        call = await Call(transport, url, text="x" * 20_000_000).run()

    assert (call.response().status, call.response().body) == (413, b"{}")
    assert asyncio.get_running_loop().time() < began_at + PATIENCE / 2


HEAD: Final = b"HTTP/1.1 200 OK\r\n"
BODY: Final = b"x" * 60_000
"""A body of four TLS records, below the limit for a response's body."""


@pytest.mark.parametrize("version", ["TLS 1.3", "TLS 1.2"])
@pytest.mark.parametrize(
    ("answer", "body"),
    [
        (HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY, BODY),
        (HEAD + b"\r\nok", b"ok"),
        (HEAD + b"\r\nok", None),
    ],
    ids=["several records", "until the end of TLS", "without the end of TLS"],
)
async def test_a_response_is_complete_however_it_arrives_unless_it_may_be_cut_off(
    answer: bytes, body: bytes | None, version: str, authority: Authority, transport: HttpTransport
) -> None:
    tls = authority.server if version == "TLS 1.3" else authority.server_of_tls_1_2

    def serve(listener: socket.socket) -> None:
        with tls.wrap_socket(listener.accept()[0], server_side=True) as session, suppress(OSError):
            session.recv(4096)
            session.sendall(answer)
            if body is not None:
                session.unwrap()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(PATIENCE)
        serving = asyncio.create_task(asyncio.to_thread(serve, listener))
        end = (await Call(transport, _url_of(listener)).run()).end
        await serving

    assert isinstance(end, NoResponse if body is None else HttpResponse)
    assert (end.status, getattr(end, "body", None)) == (200, body)


async def test_a_request_with_no_time_for_an_answer_is_not_sent(transport: HttpTransport, authority: Authority) -> None:
    """A connection is too late if it opens in the last quarter of the call's time. This test depends on real time."""
    with _never_accepting() as listening:
        call = Call(transport, _url_of(listening))
        task = asyncio.create_task(call.run(SOON))
        await _somebody_connects(listening)
        await asyncio.sleep(SOON * 0.85)
        async with await asyncio.start_server(lambda *_: None, sock=listening, ssl=authority.server):
            await task

    call.not_sent(Reason.TIMEOUT_BEFORE_SEND)


async def _somebody_connects(listening: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    connected = asyncio.Event()
    loop.add_reader(listening, connected.set)
    await asyncio.wait_for(connected.wait(), PATIENCE)
    loop.remove_reader(listening)


async def test_a_response_with_endless_trailers_is_given_up(transport: HttpTransport) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _request(reader)
        writer.write(b"HTTP/1.1 202 Accepted\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n")
        while True:
            writer.write(b"Trailer: " + b"x" * 10_000 + b"\r\n")
            await writer.drain()

    async with _open_server(serve) as url:
        end = (await Call(transport, url).run()).end

    assert isinstance(end, NoResponse)
    assert (end.status, "too long" in end.detail) == (202, True)
