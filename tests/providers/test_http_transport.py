"""How a call over HTTP may end, one way after the other, counted at the server: one POST, and the right word for it."""

from __future__ import annotations

import asyncio
import gc
import socket
import ssl
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
from dispatcher.domain.outcome import Reason
from dispatcher.providers.contract import NoPlace
from dispatcher.transport.http import HttpTransport
from dispatcher.transport.http_answer import Answer, NoAnswer, NothingLeft
from dispatcher.transport.http_connection import MAX_ANSWER_OCTETS, HttpConnection
from dispatcher.transport.tls import Tls
from tests.providers import listeners
from tests.providers.attempts import FakeAttempt
from tests.providers.conftest import Authority
from tests.waiting import Overtime, until

PATIENCE: Final = 20.0
SOON: Final = 0.4
LATER: Final = 2.0
"""A deadline that a busy machine gets to somewhere before."""
KEY: Final = {"Authorization": "Bearer secret-key"}


@pytest.fixture
async def double(tmp_path: Path, authority: Authority) -> AsyncIterator[HttpDouble]:
    """A server over TLS."""
    async with running_double(tmp_path, tls=authority.server) as running:
        yield running


@pytest.fixture
async def transport(authority: Authority) -> AsyncIterator[HttpTransport]:
    """A transport that trusts the server."""
    opened = HttpTransport(connections=8, ca_file=authority.ca_file)
    yield opened
    await opened.close()


class Call:
    """One POST, and how it ended.

    Attributes:
        left: How often `leaving` was called.
        end: What came of it.
    """

    def __init__(self, transport: HttpTransport, url: str, email_id: str = "one", *, text: str = "") -> None:
        self._transport = transport
        self._url = f"{url}/v3/mail/send"
        people = [{"to": [{"email": "ann@example.com"}], "custom_args": {"email_id": email_id}}]
        self._body = orjson.dumps({"personalizations": people, "text": text})
        self.left = 0
        self.end: Answer | NothingLeft | NoAnswer | None = None

    async def run(self, seconds: float = PATIENCE) -> Call:
        """The call, made."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        overtime = Overtime(deadline)
        try:
            self.end = await self._transport.post(self._url, KEY, self._body, FakeAttempt(1, deadline, self._leaving))
        except (NothingLeft, NoAnswer) as error:
            self.end = error
        assert overtime.end() < 1
        return self

    async def run_past_leaving(self, seconds: float) -> Call:
        """The call, made with a deadline that comes when the body has left; one that came before is put off."""
        while not (await self.run(seconds)).left and seconds < PATIENCE:
            assert isinstance(self.end, NothingLeft)
            assert self.end.reason is Reason.TIMEOUT_BEFORE_SEND
            seconds *= 4
        return self

    def _leaving(self) -> None:
        self.left += 1


async def test_an_answer_comes_with_its_headers(double: HttpDouble, transport: HttpTransport) -> None:
    call = await Call(transport, double.url).run()

    assert isinstance(call.end, Answer)
    assert (call.end.status, call.end.body) == (202, b"")
    assert len(call.end.headers["x-message-id"]) == 22
    assert call.left == 1


async def test_the_length_is_announced_and_the_body_leaves_in_one_piece(transport: HttpTransport) -> None:
    heard: list[bytes] = []

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.readuntil(b"\r\n\r\n"))
        heard.append(await reader.read(1000))
        writer.write(b"HTTP/1.1 202 Accepted\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        writer.close()
        await writer.wait_closed()

    async with await asyncio.start_server(listen, "127.0.0.1", 0) as server:
        await Call(transport, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}").run()

    head, body = heard
    assert f"Content-Length: {len(body)}\r\n".encode() in head
    assert b"chunked" not in head.lower()
    assert b"Accept-Encoding" not in head
    assert head.startswith(b"POST /v3/mail/send HTTP/1.1\r\n")


@pytest.mark.parametrize("tls", [True, False], ids=["tls", "clear"])
@pytest.mark.parametrize(
    ("act", "words", "status", "whole"),
    [
        (Fault.CLOSE_UNREAD, "no answer", None, 0),
        (Fault.RESET_UNREAD, "no answer", None, 0),
        (Fault.CLOSE, "closed", None, 1),
        (Fault.RESET, "reset", None, 1),
        (Fault.HANG, "deadline", None, 1),
        (Fault.DRIP, "deadline", None, 1),
        (Fault.DRIP_BODY, "did not end in time", 202, 1),
        (Fault.HALF, "broke off", 202, 1),
        (Fault.HALF_HEAD, "closed", None, 1),
        (Fault.GARBAGE, "no HTTP", None, 1),
    ],
)
async def test_silence_after_the_body_left_is_no_answer(
    act: Fault, words: str, status: int | None, whole: int, tls: bool, authority: Authority, tmp_path: Path,
    transport: HttpTransport,
) -> None:  # fmt: skip
    async with running_double(tmp_path, Behaviour(act), tls=authority.server if tls else None) as double:
        seconds = {Fault.HANG: SOON, Fault.DRIP: SOON, Fault.DRIP_BODY: LATER}.get(act, PATIENCE)
        call = await Call(transport, double.url).run_past_leaving(seconds)

        assert isinstance(call.end, NoAnswer)
        assert words in call.end.detail
        assert call.end.status == status
        assert call.left == 1
        await until(lambda: double.requests.total() == whole)  # it may read on after the deadline
        assert double.begun.total() == 1


@pytest.mark.parametrize("act", [act for act in Fault if act is not Fault.FLOOD])
async def test_the_next_call_is_not_affected(act: Fault, double: HttpDouble, transport: HttpTransport) -> None:
    double.behaviour = Behaviour(act)
    await Call(transport, double.url, "first").run(SOON)
    double.behaviour = Behaviour()

    call = await Call(transport, double.url, "second").run()

    assert isinstance(call.end, Answer)
    assert double.requests["second"] == 1


async def test_a_large_body_arrives_whole(double: HttpDouble, transport: HttpTransport) -> None:
    text = "A line of a long letter.\n" * 400_000

    call = await Call(transport, double.url, text=text).run()

    assert isinstance(call.end, Answer)
    assert call.left == 1
    assert double.received[0]["text"] == text


@pytest.mark.parametrize("act", [Fault.CLOSE_UNREAD, Fault.RESET_UNREAD])
async def test_a_large_body_that_breaks_off_is_a_definite_no(
    act: Fault, double: HttpDouble, transport: HttpTransport
) -> None:
    double.behaviour.fault = act

    call = await Call(transport, double.url, text="x" * 20_000_000).run()

    assert isinstance(call.end, NothingLeft)
    assert call.end.reason is Reason.CONNECTION_FAILED
    assert "before the body's end" in call.end.detail
    assert call.left == 0


async def test_a_large_body_that_nobody_takes_is_a_definite_no(transport: HttpTransport) -> None:
    with _deaf() as listening:
        call = Call(transport, _url_of(listening).replace("https", "http"), text="x" * 20_000_000)
        await call.run(4 * SOON)  # to write the body into the buffers takes a while, too

    assert isinstance(call.end, NothingLeft)
    assert call.end.reason is Reason.TIMEOUT_BEFORE_SEND
    assert "not taken" in call.end.detail
    assert call.left == 0


async def test_a_large_body_is_not_given_up_at_the_deadline_of_the_call_before(transport: HttpTransport) -> None:
    """One timer sees to the calls of a connection: what it was set for may be over while the next body leaves."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + LATER

    async def take_the_second_slowly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for is_second in (False, True):
            length = int((await reader.readuntil(b"\r\n\r\n")).rpartition(b"Content-Length: ")[2])
            if is_second:
                await until(lambda: loop.time() > deadline + 0.1)
            await reader.readexactly(length)
            writer.write(b"HTTP/1.1 202 Accepted\r\nContent-Length: 0\r\n\r\n")

    async with listeners.listening(take_the_second_slowly) as port:
        # Where the machine stood still for so long, the second has a connection, and a timer, of its own.
        await Call(transport, f"http://127.0.0.1:{port}").run(LATER)
        second = await Call(transport, f"http://127.0.0.1:{port}", text="x" * 16 * 1024 * 1024).run()

    assert isinstance(second.end, Answer)


async def test_a_redirect_is_an_answer_and_not_followed(double: HttpDouble, transport: HttpTransport) -> None:
    double.behaviour.fault = Fault.REDIRECT

    call = await Call(transport, double.url).run()

    assert isinstance(call.end, Answer)
    assert call.end.status == 307
    assert double.begun.total() == 1


async def test_of_an_endless_answer_only_the_beginning_is_kept(double: HttpDouble, transport: HttpTransport) -> None:
    double.behaviour.fault = Fault.FLOOD

    call = await Call(transport, double.url).run()

    assert isinstance(call.end, Answer)
    assert call.end.status == 202
    assert len(call.end.body) == MAX_ANSWER_OCTETS


async def test_nobody_listens(transport: HttpTransport) -> None:
    with _bound() as port:
        call = await Call(transport, f"https://127.0.0.1:{port}").run()

    assert isinstance(call.end, NothingLeft)
    assert call.end.reason is Reason.CONNECTION_FAILED
    assert "refused" in call.end.detail
    assert call.left == 0


async def test_no_such_host(transport: HttpTransport) -> None:
    call = await Call(transport, "https://no-such-host.invalid").run()

    assert isinstance(call.end, NothingLeft)
    assert call.end.reason is Reason.CONNECTION_FAILED
    assert call.left == 0


async def test_a_certificate_of_an_unknown_authority(double: HttpDouble) -> None:
    transport = HttpTransport(connections=1)

    call = await Call(transport, double.url).run()

    assert isinstance(call.end, NothingLeft)
    assert call.end.is_untrusted
    assert call.left == 0
    assert not double.begun


async def test_a_certificate_for_another_name(tmp_path: Path, authority: Authority, transport: HttpTransport) -> None:
    async with running_double(tmp_path, tls=authority.elsewhere) as double:
        call = await Call(transport, double.url).run()

    assert isinstance(call.end, NothingLeft)
    assert call.end.is_untrusted
    assert call.left == 0


@pytest.mark.parametrize("seconds", [PATIENCE, SOON], ids=["connect timeout", "deadline"])
async def test_a_connection_that_hangs(seconds: float, authority: Authority) -> None:
    transport = HttpTransport(connections=1, ca_file=authority.ca_file, connect_seconds=2 * SOON)
    with _deaf() as listening:
        call = await Call(transport, _url_of(listening)).run(seconds)

    assert isinstance(call.end, NothingLeft)
    expected = Reason.TIMEOUT_BEFORE_SEND if seconds == SOON else Reason.CONNECTION_FAILED
    assert call.end.reason is expected
    assert call.left == 0


@pytest.mark.parametrize("greeting", [b"", b"220 smtp.example ESMTP\r\n"], ids=["closes", "garbage"])
async def test_a_server_that_does_not_speak_tls(greeting: bytes, transport: HttpTransport) -> None:
    async def shut(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting)
        writer.close()
        await writer.wait_closed()

    async with await asyncio.start_server(shut, "127.0.0.1", 0) as server:
        call = await Call(transport, f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}").run()

    assert isinstance(call.end, NothingLeft)
    assert call.left == 0


async def test_a_call_that_is_cancelled_while_it_connects_leaves_no_connection(transport: HttpTransport) -> None:
    gone = asyncio.Event()

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionResetError):
            await reader.read()
        gone.set()
        writer.close()

    with _deaf() as listening:
        call = Call(transport, _url_of(listening))
        task = asyncio.create_task(call.run())
        await _somebody_connects(listening)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        async with await asyncio.start_server(listen, sock=listening):
            await asyncio.wait_for(gone.wait(), PATIENCE)

    assert call.left == 0


async def test_what_leaving_raises_is_raised_and_nothing_leaves(double: HttpDouble, transport: HttpTransport) -> None:
    class TooLate(Exception):
        pass

    def refuse() -> None:
        raise TooLate

    loop = asyncio.get_running_loop()
    with pytest.raises(TooLate):
        await transport.post(f"{double.url}/v3/mail/send", KEY, b"{}", FakeAttempt(1, loop.time() + PATIENCE, refuse))

    assert double.requests.total() == 0


async def test_connections_are_kept(double: HttpDouble, transport: HttpTransport) -> None:
    for number in range(20):
        await Call(transport, double.url, str(number)).run()

    assert double.connections == 1


@pytest.mark.parametrize(
    ("answer", "status", "body"),
    [
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 202 Accepted\r\nContent-Length: 0\r\n\r\n", 202, b""),
        (b"HTTP/1.1 202 Accepted\r\n\r\nup to the end", 202, b"up to the end"),
        (b"HTTP/1.1 400 No\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n", 400, b"abc"),
        (b"HTTP/1.1 204 None\r\n\r\n", 204, b""),
    ],
    ids=["interim", "until the end", "chunks", "without a body"],
)
async def test_an_answer_ends_as_http_says(answer: bytes, status: int, body: bytes, transport: HttpTransport) -> None:
    async with _saying(answer) as url:
        call = await Call(transport, url).run()

    assert isinstance(call.end, Answer)
    assert (call.end.status, call.end.body) == (status, body)


async def test_an_answer_that_nobody_asked_for_is_nobodys(transport: HttpTransport) -> None:
    first, second = (
        b"HTTP/1.1 202 Yes\r\nX: 1\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 500 No\r\nX: 2\r\nContent-Length: 0\r\n\r\n",
    )
    async with _saying(first + second, closes=False) as url:
        calls = [await Call(transport, url).run() for _ in range(3)]

    assert [call.end.status for call in calls if isinstance(call.end, Answer)] == [202, 202, 202]
    assert [call.end.headers["x"] for call in calls if isinstance(call.end, Answer)] == ["1", "1", "1"]


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 202 Accepted\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nab",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: h2c\r\nConnection: Upgrade\r\n\r\n",
        b"HTTP/1.1 202 Accepted\r\n" + b"X-Filler: y\r\n" * 10_000,
    ],
    ids=["broken chunks", "another protocol", "endless headers"],
)
async def test_what_is_no_whole_answer_is_none(answer: bytes, transport: HttpTransport) -> None:
    async with _saying(answer) as url:
        call = await Call(transport, url).run()

    assert isinstance(call.end, NoAnswer)
    assert call.left == 1


@asynccontextmanager
async def _saying(octets: bytes, *, closes: bool = True) -> AsyncIterator[str]:
    """A server that says the same to each request."""

    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while await reader.read(4096):
                writer.write(octets)
                if closes:
                    break
        writer.close()

    async with await asyncio.start_server(say, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_no_more_calls_than_connections_are_under_way(double: HttpDouble, authority: Authority) -> None:
    transport = HttpTransport(connections=2, ca_file=authority.ca_file)
    double.behaviour.fault = Fault.HANG

    first = [asyncio.create_task(Call(transport, double.url, str(number)).run()) for number in range(2)]
    await until(lambda: double.requests.total() == 2)

    others = await asyncio.gather(
        *(Call(transport, double.url, str(number)).run(SOON) for number in range(2, 5)), return_exceptions=True
    )

    assert [type(each) for each in others] == [NoPlace] * 3
    assert double.requests.total() == 2
    double.drop_connections()
    assert [type((await call).end) for call in first] == [NoAnswer] * 2


async def test_what_could_not_be_answered_in_time_stays(transport: HttpTransport, authority: Authority) -> None:
    """A connection that stands only in the last quarter of the time is too late; time itself is the subject here."""
    with _deaf() as listening:
        call = Call(transport, _url_of(listening))
        task = asyncio.create_task(call.run(SOON))
        await _somebody_connects(listening)
        await asyncio.sleep(SOON * 0.85)
        async with await asyncio.start_server(lambda *_: None, sock=listening, ssl=authority.server):
            await task

    assert isinstance(call.end, NothingLeft)
    assert call.end.reason is Reason.TIMEOUT_BEFORE_SEND
    assert call.left == 0


async def test_a_kept_connection_that_the_server_closed_costs_no_second_post(
    double: HttpDouble, transport: HttpTransport
) -> None:
    """The server closes after each answer without saying so: the next call meets the close half-way, or not."""
    double.behaviour.fault = Fault.LAST_ANSWER

    calls = [await Call(transport, double.url, str(number)).run() for number in range(200)]

    answered = sum(isinstance(call.end, Answer) for call in calls)
    unknown = sum(isinstance(call.end, NoAnswer) for call in calls)
    assert answered + unknown == 200
    assert max(double.requests.values()) == 1
    assert answered <= double.requests.total() <= 200


async def test_a_connection_that_the_server_dropped_while_idle_is_replaced(
    double: HttpDouble, transport: HttpTransport
) -> None:
    await Call(transport, double.url, "first").run()
    double.drop_connections()
    # Until the client's own thread has read the close, a call may still meet it half-way.
    ends: list[object] = []
    while not ends or isinstance(ends[-1], NoAnswer):
        ends.append((await Call(transport, double.url, str(len(ends))).run()).end)

    assert isinstance(ends[-1], Answer)
    assert double.connections == 2
    assert set(double.requests.values()) == {1}


async def test_two_hundred_without_an_answer_are_posted_once_each(double: HttpDouble, transport: HttpTransport) -> None:
    double.behaviour.fault = Fault.CLOSE

    calls = await asyncio.gather(*(Call(transport, double.url, str(number)).run() for number in range(200)))

    assert all(isinstance(call.end, NoAnswer) for call in calls)
    assert set(double.requests.values()) == {1}
    assert len(double.requests) == 200


async def test_no_thread_begins_before_the_first_call(authority: Authority) -> None:
    """The parent tries each adapter before it forks, and must have no thread then."""
    threads = _threads()  # of tests before this one, too, which may end meanwhile

    await HttpTransport(connections=1, ca_file=authority.ca_file).close()

    assert _threads() <= threads


def test_a_file_without_certificates_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("nothing")

    with pytest.raises(ssl.SSLError):
        HttpTransport(connections=1, ca_file=tmp_path / "ca.pem")


def _threads() -> set[str]:
    return {path.name for path in Path("/proc/self/task").iterdir()}


def _url_of(listening: socket.socket) -> str:
    return f"https://127.0.0.1:{listening.getsockname()[1]}"


@contextmanager
def _bound() -> Iterator[int]:
    """A port that is taken, and where nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


@contextmanager
def _deaf() -> Iterator[socket.socket]:
    """A socket that connections are made to by the system, and that nobody takes them from."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(8)
        listening.setblocking(False)
        yield listening


async def _somebody_connects(listening: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    connected = asyncio.Event()
    loop.add_reader(listening, connected.set)
    await asyncio.wait_for(connected.wait(), PATIENCE)
    loop.remove_reader(listening)


@pytest.mark.parametrize("act", [None, Fault.CLOSE], ids=["ended by us", "ended by the server"])
def test_a_connection_that_ended_is_gone_without_the_collector(
    tmp_path: Path, authority: Authority, act: Fault | None
) -> None:
    """Which comes by once an hour in a quiet worker: until then each would keep TLS's buffers."""

    async def use_and_end() -> None:
        async with running_double(tmp_path, Behaviour(fault=act), tls=authority.server) as double:
            transport = HttpTransport(connections=8, ca_file=authority.ca_file)
            for number in range(3):
                call = Call(transport, double.url, str(number))
                await call.run()
                call.end = None  # a fault knows the frames that it came through, and they know the connection
            await transport.close()
            await until(lambda: not _alive())

    gc.collect()
    gc.disable()
    try:
        uvloop.run(use_and_end())
    finally:
        gc.enable()


def _alive() -> list[object]:
    return [each for each in gc.get_objects() if type(each) in (HttpConnection, Tls, httptools.HttpResponseParser)]


class BrokenTransport(asyncio.Transport):
    """One that breaks at the first write, and tells its protocol a turn of the loop later, as uvloop's does."""

    def __init__(self, local: socket.socket) -> None:
        super().__init__({"socket": local})
        self.writes = 0

    def is_closing(self) -> bool:
        return self.writes > 0

    def write(self, _data: object) -> None:
        self.writes += 1

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass


async def test_a_connection_that_broke_a_moment_ago_is_given_nothing_more() -> None:
    local, remote = socket.socketpair()
    with local, remote:
        transport = BrokenTransport(local)
        connection = HttpConnection(lambda _: None)
        connection.connection_made(transport)
        connection.is_busy = True

        await connection.go_on_slowly([bytes(1024)] * 16)

        assert transport.writes == 1
        assert (connection.is_open, connection.stands) == (True, False)
