"""Finds free ports on the loopback interface."""

from __future__ import annotations

import random
import socket

LOOPBACK = "127.0.0.1"

# These ports are below the kernel's ephemeral range (32768 and up), so that no outgoing connection takes a chosen port
# before a server listens on the port.
CHOICE = range(20_000, 32_000)


def is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
    return True


def accepts(port: int) -> bool:
    try:
        with socket.create_connection((LOOPBACK, port), timeout=1):
            return True
    except OSError:
        return False


def choose(count: int) -> list[int]:
    """Chooses `count` free ports at random, so that servers that start at the same time rarely choose the same port."""
    chosen: list[int] = []
    for port in random.sample(CHOICE, len(CHOICE)):
        if len(chosen) == count:
            break
        if is_free(port):
            chosen.append(port)
    return chosen


def keep_or_choose(earlier: list[int], count: int) -> list[int]:
    """Returns the earlier ports if all of them are free, so that URLs stay the same. Otherwise, returns new ports."""
    if len(earlier) == count and all(map(is_free, earlier)):
        return earlier
    return choose(count)
