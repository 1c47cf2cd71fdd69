"""Each slot has one set of metric files, counts continue after a restart, and no error in a file stops a process. A
scrape shows the values of the valid files, and the number of invalid files."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.samples import Sample

from dispatcher.telemetry import metric_files
from dispatcher.telemetry.metric_files import FIRST_OCTETS, PREFIXES
from tests.telemetry.counting import EXPIRED, IN_FLIGHT, SENT, counting, samples, skipped

MANY = 600


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.db"))


def text_of(sample: Sample) -> str:
    labels = ",".join(f'{name}="{value}"' for name, value in sorted(sample.labels.items()))
    return f"{sample.name}{{{labels}}}" if labels else sample.name


def test_a_gauge_ends_with_its_process_and_starts_at_zero(tmp_path: Path) -> None:
    with counting(tmp_path, "w0") as first, counting(tmp_path, "w1") as second:
        first.tell("set 5")
        second.tell("set 3")
        assert samples(tmp_path)[IN_FLIGHT] == 8

        first.kill()
        assert samples(tmp_path)[IN_FLIGHT] == 3

        with counting(tmp_path, "w0"):
            assert samples(tmp_path)[IN_FLIGHT] == 3


def test_two_processes_of_one_slot_count_at_the_same_time(tmp_path: Path) -> None:
    with counting(tmp_path) as old:
        old.tell("add 10")
        with counting(tmp_path) as new:
            old.tell("add 10")
            new.tell("add 1")
            assert samples(tmp_path)[SENT] == 21

    with counting(tmp_path) as third:
        third.tell("add 1")

    assert samples(tmp_path)[SENT] == 22
    assert len(files(tmp_path)) == 2 * len(PREFIXES)


def test_processes_above_the_limit_of_a_slot_do_not_count(tmp_path: Path) -> None:
    with counting(tmp_path), counting(tmp_path), counting(tmp_path), counting(tmp_path), counting(tmp_path) as fifth:
        assert fifth.tell("add 1") == "silent"

    assert len(files(tmp_path)) == metric_files.GENERATIONS * len(PREFIXES)


@pytest.mark.parametrize("octets", [0, FIRST_OCTETS - 1])
def test_a_full_disk_stops_the_counting_and_not_the_process(tmp_path: Path, octets: int) -> None:
    with counting(tmp_path, file_octets=octets) as process:
        assert process.tell("add 1") == "silent"
        assert process.tell("add 1") == "silent"

    assert files(tmp_path) == []
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]


def test_a_folder_that_cannot_be_created_stops_the_counting_and_no_process(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with counting(tmp_path / "file" / "metrics") as process:
        assert process.tell("add 1") == "silent"
    metric_files.wipe(tmp_path / "file" / "metrics")


def test_a_deleted_folder_is_created_again(tmp_path: Path) -> None:
    folder = tmp_path / "metrics"
    with counting(folder) as process:
        shutil.rmtree(folder)
        assert process.tell("add 1") == "counts"
        assert SENT not in samples(folder), "a missing folder gives an empty scrape"

    with counting(folder) as process:
        process.tell("add 1")

    assert samples(folder)[SENT] == 1


def test_a_corrupt_file_is_replaced(tmp_path: Path) -> None:
    with counting(tmp_path) as process:
        process.tell("add 5")
    (tmp_path / "counter_w0-0.db").write_bytes(b"\xff" * 100)

    with counting(tmp_path) as process:
        process.tell("add 1")

    assert samples(tmp_path)[SENT] == 1


def test_the_parent_deletes_only_its_own_files_and_not_those_of_the_api(tmp_path: Path) -> None:
    with counting(tmp_path) as process:
        process.tell("add 5")
    for other in ("counter_4711.db", "notes.txt"):
        (tmp_path / other).touch()
    with counting(tmp_path, metric_files.API) as living:
        living.tell("add 5")

        metric_files.wipe(tmp_path)
        living.tell("add 1")

        assert samples(tmp_path)[SENT] == 6
    kept = [path.name for path in tmp_path.iterdir() if metric_files.API not in path.name]
    assert sorted(kept) == ["counter_4711.db", "notes.txt"]


def test_all_api_processes_of_a_host_count(tmp_path: Path) -> None:
    with ExitStack() as running:
        for _ in range(metric_files.GENERATIONS + 1):
            running.enter_context(counting(tmp_path, metric_files.API)).tell("add 1")

    assert samples(tmp_path)[SENT] == metric_files.GENERATIONS + 1


def test_a_file_grows_when_it_is_full(tmp_path: Path) -> None:
    with counting(tmp_path) as process:
        for number in range(MANY):
            process.tell(f"label {number}")
        assert len(samples(tmp_path)) > MANY
        process.kill()
    assert (tmp_path / "counter_w0-0.db").stat().st_size > FIRST_OCTETS

    with counting(tmp_path) as successor:
        successor.tell("label 0")

    assert samples(tmp_path)['dispatcher_throttles_total{provider="provider-0"}'] == 2


def test_threads_count_new_labels_at_the_same_time(tmp_path: Path) -> None:
    with counting(tmp_path) as process:
        process.tell(f"race {MANY}")

    found = samples(tmp_path)
    assert sum(value for name, value in found.items() if name.startswith("dispatcher_throttles_total")) == 4 * MANY


def test_a_full_disk_while_a_file_grows_stops_the_counting_and_not_the_process(tmp_path: Path) -> None:
    with counting(tmp_path, file_octets=FIRST_OCTETS + 4096) as process:
        answers = [process.tell(f"label {number}") for number in range(MANY)]
        assert process.tell("add 1") == "silent"

    assert (answers[0], answers[-1]) == ("counts", "silent")
    assert samples(tmp_path)['dispatcher_throttles_total{provider="provider-0"}'] == 1


def test_prometheus_client_reads_our_files(tmp_path: Path) -> None:
    with counting(tmp_path, "w0") as first, counting(tmp_path, "w1") as second:
        for process in (first, second):
            process.tell("add 3")
            process.tell("set 2")
            for seconds in (0.003, 0.003, 0.7, 1000):
                process.tell(f"observe {seconds}")
        theirs = {
            text_of(sample): sample.value
            for metric in MultiProcessCollector(CollectorRegistry(), str(tmp_path)).collect()
            for sample in metric.samples
        }
        ours = samples(tmp_path)
        assert skipped(tmp_path) == {}

    assert {name: value for name, value in ours.items() if "skipped" not in name} == theirs


MINE = "counter_w1-0.db"


def entry(key: object, value: float) -> bytes:
    text = json.dumps(key).encode()
    padded = text + b" " * (8 - (len(text) + 4) % 8)
    body = struct.pack(f"i{len(padded)}sdd", len(text), padded, value, 0.0)
    return struct.pack("ii", 8 + len(body), 0) + body


def sent(value: float = 1.0, **labels: object) -> bytes:
    named = {"provider": "smtp", "outcome": "accepted", **labels}
    return entry(["dispatcher_emails_total", "dispatcher_emails_total", named, "…"], value)


def write(name: str, octets: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(octets)


PLUGIN, BUCKETS = "dispatcher_plugin_total", "histogram_w1-0.db"
BOUND = entry(["dispatcher_plugin", "dispatcher_plugin_bucket", {"le": "x"}, "…"], 1.0)
NUMBER_7 = entry([PLUGIN, PLUGIN, {"a": 7}, "…"], 1.0)
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
    "a label of an unknown metric that is no text": ("foreign", write(MINE, NUMBER_7)),
    "a bound that is no number": ("corrupt", write(BUCKETS, BOUND)),
    "a key that is no key": ("corrupt", write(MINE, entry({"a": 1}, 1.0))),
    "a counter among the histograms": ("foreign", write(BUCKETS, sent())),
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


def test_counts_of_an_earlier_release_with_another_description_are_added(tmp_path: Path) -> None:
    (tmp_path / "counter_api-0.db").write_bytes(sent(5.0))
    (tmp_path / "counter_api-1.db").write_bytes(sent(2.0).replace(b"\\u2026", b"before"))

    assert samples(tmp_path)[SENT] == 7


def test_known_labels_start_at_zero_and_adding_zero_creates_no_value(tmp_path: Path) -> None:
    with counting(tmp_path) as process:
        process.tell("add 0")
        found = samples(tmp_path)

    assert found[EXPIRED] == 0
    assert SENT not in found


@pytest.mark.parametrize("seconds", ["", "0.0 0.5 1.0", "0.7 2.5 2.5 99.0", "99.0 1.0 0.0 1.0"])
def test_observing_many_values_equals_observing_each(tmp_path: Path, seconds: str) -> None:
    with counting(tmp_path / "each") as singly, counting(tmp_path / "all") as together:
        for value in seconds.split():
            singly.tell(f"observe {value}")
        together.tell(f"observe-all {seconds}")

        counted = samples(tmp_path / "each")
        assert samples(tmp_path / "all") == counted

    assert counted.get('dispatcher_send_seconds_count{provider="smtp"}', 0) == len(seconds.split())
