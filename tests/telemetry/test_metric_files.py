"""Each slot has one set of metric files, counts continue after a restart, and no error in a file stops a process."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.samples import Sample

from dispatcher.telemetry import metric_files
from dispatcher.telemetry.metric_files import FIRST_OCTETS, PREFIXES
from tests.telemetry.counting import ROOT, counting
from tests.telemetry.pictures import IN_FLIGHT, SENT, samples

MANY = 600
"""More label values than fit into a new file."""


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.db"))


def text_of(sample: Sample) -> str:
    labels = ",".join(f'{name}="{value}"' for name, value in sorted(sample.labels.items()))
    return f"{sample.name}{{{labels}}}" if labels else sample.name


def test_a_counter_continues_the_count_of_a_killed_process(tmp_path: Path) -> None:
    for _ in range(3):
        with counting(tmp_path) as process:
            process.tell("add 2")
            process.kill()

    assert samples(tmp_path)[SENT] == 6
    assert len(files(tmp_path)) == len(PREFIXES)


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
        assert fifth.tell("add 1").startswith("silent")

    assert len(files(tmp_path)) == metric_files.GENERATIONS * len(PREFIXES)


@pytest.mark.parametrize("octets", [0, 4096, FIRST_OCTETS - 1])
def test_a_full_disk_stops_the_counting_and_not_the_process(tmp_path: Path, octets: int) -> None:
    with counting(tmp_path, file_octets=octets) as process:
        assert process.tell("add 1").startswith("silent")
        assert process.tell("add 1").startswith("silent")

    assert files(tmp_path) == []
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]


def test_a_folder_that_cannot_be_created_stops_the_counting(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with counting(tmp_path / "file" / "metrics") as process:
        assert process.tell("add 1").startswith("silent")


def test_a_deleted_folder_is_created_again(tmp_path: Path) -> None:
    folder = tmp_path / "metrics"
    with counting(folder) as process:
        shutil.rmtree(folder)
        assert process.tell("add 1").startswith("counts")
        assert SENT not in samples(folder)

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


def test_the_parent_deletes_only_its_own_files(tmp_path: Path) -> None:
    with counting(tmp_path) as process:
        process.tell("add 5")
    (tmp_path / "counter_4711.db").touch()
    (tmp_path / "notes.txt").touch()

    metric_files.wipe(tmp_path)

    assert sorted(path.name for path in tmp_path.iterdir()) == ["counter_4711.db", "notes.txt"]


def test_the_parent_keeps_the_files_of_the_api(tmp_path: Path) -> None:
    with counting(tmp_path, metric_files.API) as living:
        living.tell("add 5")
        metric_files.wipe(tmp_path)
        living.tell("add 1")

        assert samples(tmp_path)[SENT] == 6


def test_all_api_processes_of_a_host_count(tmp_path: Path) -> None:
    with ExitStack() as running:
        for _ in range(metric_files.GENERATIONS + 1):
            running.enter_context(counting(tmp_path, metric_files.API)).tell("add 1")

    assert samples(tmp_path)[SENT] == metric_files.GENERATIONS + 1


def test_wiping_an_impossible_folder_raises_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    metric_files.wipe(tmp_path / "file" / "metrics")


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
    program = f"""
import sys, threading
from pathlib import Path
from dispatcher.telemetry import metric_files, metrics

metric_files.begin(Path({str(tmp_path)!r}), "w0")
sys.setswitchinterval(1e-6)

def count(thread):
    for number in range({MANY}):
        metrics.THROTTLES.add(1, f"provider-{{thread}}-{{number}}")

threads = [threading.Thread(target=count, args=(number,)) for number in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)

    found = samples(tmp_path)
    assert sum(value for name, value in found.items() if name.startswith("dispatcher_throttles_total")) == 4 * MANY


def test_a_full_disk_while_a_file_grows_stops_the_counting_and_not_the_process(tmp_path: Path) -> None:
    with counting(tmp_path, file_octets=FIRST_OCTETS + 4096) as process:
        answers = [process.tell(f"label {number}").split()[0] for number in range(MANY)]
        assert process.tell("add 1").startswith("silent")

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

    assert {name: value for name, value in ours.items() if "skipped" not in name} == theirs


@pytest.mark.parametrize("restarts", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_restarts_add_no_files_and_never_decrease_a_counter(tmp_path: Path, restarts: int) -> None:
    command = [sys.executable, "-m", "tests.telemetry.storm", str(tmp_path), "4", str(restarts)]

    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True, timeout=300)

    report = json.loads(done.stdout)
    assert report["counted"] == report["expected"] == restarts
    assert report["went_back"] == 0
    assert report["scrapes"] > 0
    assert len(files(tmp_path)) <= 4 * len(PREFIXES)
    # Use the minimum, which shows the cost of the files. The median would include the load of other programs.
    assert report["quickest_scrape_ms"] < 100, report
