"""A scrape shows the values of the valid files, and the number of invalid files."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.telemetry.counting import counting
from tests.telemetry.pictures import SENT, samples, skipped

MINE = "counter_w1-0.db"


def entry(key: object, value: float) -> bytes:
    """The content of a prometheus-client file with one value."""
    text = json.dumps(key).encode()
    padded = text + b" " * (8 - (len(text) + 4) % 8)
    body = struct.pack(f"i{len(padded)}sdd", len(text), padded, value, 0.0)
    return struct.pack("ii", 8 + len(body), 0) + body


def sent(value: float = 1.0, **labels: object) -> bytes:
    """The content of a file that counts this number of accepted emails."""
    named = {"provider": "smtp", "outcome": "accepted", **labels}
    return entry(["dispatcher_emails_total", "dispatcher_emails_total", named, "…"], value)


def write(name: str, octets: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(octets)


BAD = {
    "empty": ("empty", write(MINE, b"")),
    "too short for a head": ("empty", write(MINE, b"\x10\0\0\0")),
    "noise": ("corrupt", write(MINE, bytes(range(256)) * 16)),
    "truncated": ("corrupt", write(MINE, sent()[:-8])),
    "a length beyond its end": ("corrupt", write(MINE, struct.pack("iii", 1 << 30, 0, 1 << 29) + b"x" * 64)),
    "a negative length": ("corrupt", write(MINE, struct.pack("iii", 64, 0, -5) + b"x" * 64)),
    "not UTF-8": ("corrupt", write(MINE, sent().replace(b"smtp", b"\xff\xfe\xff\xfe"))),
    "a counter below zero": ("corrupt", write(MINE, sent(-1.0))),
    "a counter without a number": ("corrupt", write(MINE, sent(float("nan")))),
    "another program's metric": ("foreign", write(MINE, entry(["http", "http_total", {}, "…"], 1.0))),
    "a label that we do not declare": ("foreign", write(MINE, sent(address="a@example.org"))),
    "a label that is no text": ("foreign", write(MINE, sent(provider=7))),
    "a label of an unknown metric that is no text": (
        "foreign",
        write(MINE, entry(["dispatcher_plugin_total", "dispatcher_plugin_total", {"a": 7}, "…"], 1.0)),
    ),
    "a bound that is no number": (
        "corrupt",
        write("histogram_w1-0.db", entry(["dispatcher_plugin", "dispatcher_plugin_bucket", {"le": "x"}, "…"], 1.0)),
    ),
    "a key that is no key": ("corrupt", write(MINE, entry({"a": 1}, 1.0))),
    "a counter among the histograms": ("foreign", write("histogram_w1-0.db", sent())),
    "another program's file": ("foreign", write("counter_4711.db", sent())),
    "a folder": ("unreadable", lambda folder: (folder / MINE).mkdir()),
    "a link to itself": ("unreadable", lambda folder: (folder / MINE).symlink_to(folder / MINE)),
}


@pytest.mark.parametrize(("reason", "spoil"), BAD.values(), ids=BAD.keys())
def test_a_bad_file_is_skipped_and_counted(tmp_path: Path, reason: str, spoil: Callable[[Path], object]) -> None:
    (tmp_path / "counter_w0-0.db").write_bytes(sent(5.0))

    spoil(tmp_path)

    assert samples(tmp_path)[SENT] == 5
    assert skipped(tmp_path) == {reason: 1}


def test_counts_of_an_earlier_release_with_other_descriptions_and_bounds_are_added(tmp_path: Path) -> None:
    bucket = "dispatcher_plugin_seconds_bucket"

    def observed(about: str, bound: str) -> bytes:
        return entry(["dispatcher_plugin_seconds", bucket, {"le": bound}, about], 1.0)

    (tmp_path / "counter_api-0.db").write_bytes(sent(5.0))
    (tmp_path / "counter_api-1.db").write_bytes(sent(2.0).replace(b"\\u2026", b"before"))
    for number, (about, bound) in enumerate([("before", "0.5"), ("before", "+Inf"), ("now", "2.0"), ("now", "+Inf")]):
        (tmp_path / f"histogram_api-{number}.db").write_bytes(observed(about, bound))

    found = {name: value for name, value in samples(tmp_path).items() if "plugin" in name}

    assert samples(tmp_path)[SENT] == 7
    assert list(found.items()) == [
        (f'{bucket}{{le="0.5"}}', 1),
        (f'{bucket}{{le="2.0"}}', 2),
        (f'{bucket}{{le="+Inf"}}', 4),
        ("dispatcher_plugin_seconds_count", 4),
    ]


def test_a_missing_folder_gives_an_empty_scrape(tmp_path: Path) -> None:
    assert skipped(tmp_path / "nowhere") == {}
    assert SENT not in samples(tmp_path / "nowhere")


def test_no_file_of_a_running_process_is_skipped(tmp_path: Path) -> None:
    with counting(tmp_path) as process:
        process.tell("add 1")
        process.tell("observe 1")
        process.tell("set 1")

        assert skipped(tmp_path) == {}
