"""Tests `Network`, which is cut, black-holed and healed between a client and a small echo server."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from urllib.parse import urlsplit

import pytest

from tests.chaos.network import Network

SERVER = "postgres"
SILENCE_SECONDS = 0.3


@pytest.fixture
def network() -> Iterator[Network]:
    """The network between a client and an echo server."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=_serve, args=[server], daemon=True).start()
        with closing(Network({SERVER: f"postgresql://user:password@127.0.0.1:{server.getsockname()[1]}/db?a=b"})) as it:
            yield it
        server.shutdown(socket.SHUT_RDWR)


def _serve(server: socket.socket) -> None:
    def echo(client: socket.socket) -> None:
        with client:
            while data := client.recv(100):
                client.sendall(data)

    while True:
        try:
            client, _ = server.accept()
        except OSError:
            return
        threading.Thread(target=echo, args=[client], daemon=True).start()


def connect(network: Network) -> socket.socket:
    url = urlsplit(network.urls[SERVER])
    assert (url.username, url.password, url.path, url.query) == ("user", "password", "/db", "a=b")
    return socket.create_connection((url.hostname, url.port), timeout=20)


def echoed(client: socket.socket, data: bytes) -> bytes:
    """The echoed bytes; empty if the connection has ended."""
    try:
        client.sendall(data)
        return client.recv(100)
    except ConnectionError:
        return b""


def test_a_cut_ends_connections_and_refuses_new_ones_until_heal(network: Network) -> None:
    with connect(network) as client:
        assert echoed(client, b"one") == b"one"

        network.cut([SERVER])

        assert network.away == {SERVER}
        assert echoed(client, b"two") == b""
    with connect(network) as client:
        assert echoed(client, b"three") == b""
    network.heal()
    with connect(network) as client:
        assert echoed(client, b"four") == b"four"


def test_a_black_hole_keeps_connections_open_and_forwards_what_it_held_after_heal(network: Network) -> None:
    with connect(network) as client:
        assert echoed(client, b"one") == b"one"
        network.black_hole([SERVER])
        client.settimeout(SILENCE_SECONDS)
        with pytest.raises(TimeoutError):
            echoed(client, b"two")

        network.heal()

        client.settimeout(20)
        assert client.recv(100) == b"two"
