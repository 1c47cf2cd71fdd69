"""Loopback ports that nobody uses now."""

from __future__ import annotations

import random
import socket

LOOPBACK = "127.0.0.1"

# Below the kernel's ephemeral range (32768 and up), so that no outgoing connection takes a port between choice and use.
CHOICE = range(20_000, 32_000)


def is_free(port: int) -> bool:
    """Whether a server could listen on the loopback port now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
    return True


def accepts(port: int) -> bool:
    """Whether somebody listens on the loopback port now."""
    try:
        with socket.create_connection((LOOPBACK, port), timeout=1):
            return True
    except OSError:
        return False


def choose(count: int) -> list[int]:
    """Distinct free ports; random, so that two sets that start at once do not meet."""
    chosen: list[int] = []
    for port in random.sample(CHOICE, len(CHOICE)):
        if len(chosen) == count:
            break
        if is_free(port):
            chosen.append(port)
    return chosen


def keep_or_choose(earlier: list[int], count: int) -> list[int]:
    """The ports of last time when they are all free, so that URLs survive a restart; else new ones."""
    if len(earlier) == count and all(map(is_free, earlier)):
        return earlier
    return choose(count)
