"""The in-flight ledger of a dead worker is correct, or reports an unsent email as on the wire. It never reports an
email on the wire as unsent."""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import shutil
import signal
import socket
import struct
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Final
from uuid import UUID, uuid4
from zlib import crc32

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dispatcher.domain.outcome import Accepted, Deferred, Outcome, PartialDelivery, Reason, Rejected, Uncertain
from dispatcher.domain.status import OnUncertain
from dispatcher.errors import DispatcherError
from dispatcher.host import ledger as ledger_module
from dispatcher.host import ledger_format
from dispatcher.host.clock import boot_id
from dispatcher.host.ledger import Ledger
from dispatcher.host.ledger_format import FORMAT, InFlightAttempt, LedgerUnreadable, RenderSuspect
from dispatcher.host.ledger_reader import DeadLedger, LivingLedger, dead_ledger, living_ledger

HEADER_BYTES: Final = 512
SLOT_BYTES: Final = 512
INODE_AT: Final = 184
ID: Final = UUID("018f3a1e-7b5c-7def-8abc-0123456789ab")
DATABASE_ID: Final = UUID("0d150a7c-0000-4000-8000-0000000000db")
OTHER_ID: Final = UUID("018f3a1e-7b5d-7def-8abc-0123456789ab")

OUTCOMES: Final[tuple[Outcome, ...]] = (
    Accepted(),
    Accepted("<018f@example.com>", "250 2.0.0 queued as 4XyZ"),
    *(Deferred(reason, "4.7.1 slow down", "451 4.7.1", 2.5) for reason in Reason),
    Deferred(Reason.THROTTLED),
    Deferred(Reason.RECIPIENT_DEFERRED, partial=PartialDelivery({1: None, 9: None, 1000: None})),
    Deferred(Reason.RECIPIENT_DEFERRED, retry_after=0.0, partial=PartialDelivery({2: None}, has_progress=False)),
    *(Rejected(reason, "no", "550 5.1.1") for reason in Reason),
    Rejected(Reason.REFUSED),
    Uncertain("The connection broke off.", "502"),
    Uncertain(),
)


Act = Callable[[Ledger], Any]
Told = tuple[tuple[UUID, Outcome | None], ...]
"""The email and the answer of each attempt."""


def die(act: Callable[[], object]) -> None:
    """Runs a function in a forked process that is then killed with SIGKILL."""
    pid = os.fork()
    if pid == 0:
        try:
            act()
            os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


def leave(ledger: Ledger, email_id: UUID = ID, token: int = 7, *, policy: OnUncertain = OnUncertain.HOLD) -> int:
    ledger.set_database(DATABASE_ID)
    return ledger.mark_on_wire(email_id, token, 3, provider="smtp", started_at=1_790_000_000.25, policy=policy)


def use(ledger: Ledger) -> int:
    """Uses a slot and clears it, so that its bytes are those of an older attempt and answer."""
    slot = leave(ledger, OTHER_ID)
    ledger.mark_answered(slot, Accepted("older", "x" * 160), finished_at=1.0)
    ledger.clear(slot)
    return slot


def used_before(ledger: Ledger) -> int:
    use(ledger)
    return leave(ledger)


def answered(ledger: Ledger) -> int:
    slot = leave(ledger)
    ledger.mark_answered(slot, Accepted("new"), finished_at=2.0)
    return slot


def told(attempts: tuple[InFlightAttempt, ...]) -> Told:
    return tuple((attempt.email_id, attempt.outcome) for attempt in attempts)


def read(path: Path) -> DeadLedger:
    with dead_ledger(path) as found:
        assert found is not None
        return found


def only_file(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def after(folder: Path, act: Callable[[Ledger], object], slots: int = 4) -> DeadLedger:
    """The ledger of a worker that ran this function and was killed."""
    die(lambda: act(Ledger(folder, worker="host:w0:17:cafe", slot="host:w0", slots=slots)))
    return read(only_file(folder))


class TestLedgerOfADeadWorker:
    """Each test kills a real process."""

    def test_nothing_was_sent(self, tmp_path: Path) -> None:
        worker, slot = "h" * 28 + ":w255:4194304:deadbeef", "h" * 28 + ":w255"  # names of the maximum length
        folder = tmp_path / "run" / "dispatcher"  # it is created
        die(lambda: Ledger(folder, worker=worker, slot=slot, slots=4))

        found = read(only_file(folder))

        assert (found.worker, found.slot, found.attempts) == (worker, slot, ())
        assert found.is_complete

    @pytest.mark.parametrize("policy", OnUncertain)
    def test_an_attempt_was_on_the_wire(self, tmp_path: Path, policy: OnUncertain) -> None:
        found = after(tmp_path, lambda ledger: leave(ledger, policy=policy))

        assert found.attempts == (InFlightAttempt(ID, 7, 3, "smtp", 1_790_000_000.25, policy),)

    def test_every_attempt_of_a_full_window_was_answered(self, tmp_path: Path) -> None:
        outcomes = OUTCOMES * 15

        def work(ledger: Ledger) -> None:
            for number, outcome in enumerate(outcomes):
                ledger.mark_answered(leave(ledger, UUID(int=number)), outcome, finished_at=1_790_000_001.5)

        found = after(tmp_path, work, slots=len(outcomes))

        begun = (7, 3, "smtp", 1_790_000_000.25, OnUncertain.HOLD)
        assert len(outcomes) > 500
        assert sorted(found.attempts, key=lambda attempt: attempt.email_id) == [
            InFlightAttempt(UUID(int=number), *begun, 1_790_000_001.5, outcome)
            for number, outcome in enumerate(outcomes)
        ]

    def test_a_cleared_slot_is_reused_and_an_attempt_without_a_slot_is_refused(self, tmp_path: Path) -> None:
        def work(ledger: Ledger) -> None:
            for _ in range(10):
                use(ledger)
            for _ in range(4):
                leave(ledger, OTHER_ID, token=8)
            with pytest.raises(IndexError):
                leave(ledger, uuid4())

        found = after(tmp_path, work)

        attempts = [(attempt.email_id, attempt.lease_token, attempt.outcome) for attempt in found.attempts]
        assert attempts == [(OTHER_ID, 8, None)] * 4

    def test_an_email_that_was_being_rendered_is_a_suspect(self, tmp_path: Path) -> None:
        def work(ledger: Ledger) -> None:
            ledger.end_rendering(ledger.begin_rendering(uuid4(), 1))
            ledger.begin_rendering(ID, 7)
            ledger.end_rendering(ledger.begin_rendering(uuid4(), 1))
            ledger.begin_rendering(OTHER_ID, 8)

        found = after(tmp_path, work)

        assert set(found.suspects) == {RenderSuspect(ID, 7), RenderSuspect(OTHER_ID, 8)}
        assert found.attempts == ()

    def test_if_too_many_emails_are_rendered_at_once_only_the_first_ones_are_suspects(self, tmp_path: Path) -> None:
        def work(ledger: Ledger) -> None:
            places = [ledger.begin_rendering(uuid4(), 1) for _ in range(40)]
            for place in places:
                ledger.end_rendering(place)
            leave(ledger)

        found = after(tmp_path, work)

        assert found.suspects == ()
        assert [attempt.email_id for attempt in found.attempts] == [ID]

    def test_a_ledger_with_open_attempts_is_kept_also_at_an_exit(self, tmp_path: Path) -> None:
        def work(ledger: Ledger) -> None:
            ledger.clear(leave(ledger))
            ledger.mark_answered(leave(ledger, OTHER_ID), Accepted(), finished_at=2.0)
            ledger.close()

        assert [attempt.email_id for attempt in after(tmp_path, work).attempts] == [OTHER_ID]

    def test_a_full_disk_leaves_no_partial_ledger(self, tmp_path: Path) -> None:
        def on_a_full_disk() -> None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024))
            with pytest.raises(DispatcherError, match="File too large"):
                Ledger(tmp_path, worker="w", slot="s", slots=8)

        die(on_a_full_disk)

        assert list(tmp_path.iterdir()) == []

    def test_a_ledger_that_is_being_settled_cannot_be_settled_twice(self, tmp_path: Path) -> None:
        die(lambda: Ledger(tmp_path, worker="w", slot="s", slots=1))
        path = only_file(tmp_path)

        with dead_ledger(path) as first, dead_ledger(path) as second:
            assert first is not None
            assert second is None
        assert read(path).worker == "w"

    @pytest.mark.parametrize("boot", ["", "00000000-0000-0000-0000-000000000000"])
    def test_a_ledger_from_before_the_last_boot_is_read_but_not_complete(self, tmp_path: Path, boot: str) -> None:
        die(lambda: leave(Ledger(tmp_path, worker="w", slot="s", slots=1, boot=boot)))

        found = read(only_file(tmp_path))

        assert [attempt.email_id for attempt in found.attempts] == [ID]
        assert not found.is_complete


class TestLedgerOfALiveWorker:
    """While a worker is alive, the relay may only read the worker's ledger and void the worker's leases."""

    @pytest.fixture
    def ledger(self, tmp_path: Path) -> Ledger:
        return Ledger(tmp_path / "made", worker="w", slot="s", slots=3)

    def test_the_relay_reads_attempts_while_the_worker_is_alive(self, ledger: Ledger) -> None:
        seen = living_ledger(ledger.path)
        assert seen is not None
        assert seen.attempts() == ()

        leave(ledger)
        ledger.mark_answered(leave(ledger, OTHER_ID), Accepted("a"), finished_at=1.0)
        ledger.clear(leave(ledger, uuid4()))

        assert told(seen.attempts()) == ((ID, None), (OTHER_ID, Accepted("a")))

    def test_the_worker_sees_voided_leases_at_once(self, ledger: Ledger) -> None:
        leave(ledger)
        seen = living_ledger(ledger.path)
        assert seen is not None
        assert ledger.voided_at == 0.0
        before = {each.name for each in Path("/proc/self/fd").iterdir()}

        seen.void_leases(12.5)

        assert ledger.voided_at == 12.5
        assert [attempt.email_id for attempt in seen.attempts()] == [ID]
        assert {each.name for each in Path("/proc/self/fd").iterdir()} == before, "a file descriptor is left open"

    def test_neither_the_ledger_of_a_live_worker_nor_a_deleted_one_is_settled(self, ledger: Ledger) -> None:
        for path in (ledger.path, ledger.path.with_name("gone.ledger")):
            with dead_ledger(path) as found:
                assert found is None

    def test_a_ledger_is_private_and_whole_and_a_clean_exit_deletes_it(self, tmp_path: Path) -> None:
        ledger = Ledger(tmp_path / "made", worker="host.example:w0:1", slot="s", slots=1000)
        assert [path.name for path in ledger.path.parent.iterdir()] == ["host.example:w0:1.ledger"]
        assert (ledger.path.stat().st_mode | ledger.path.parent.stat().st_mode) & 0o077 == 0
        # If the file were sparse, a later write on a full disk would kill the worker with SIGBUS.
        assert ledger.path.stat().st_blocks * 512 >= HEADER_BYTES + 1000 * SLOT_BYTES
        ledger.clear(leave(ledger))

        ledger.close()

        assert list(ledger.path.parent.iterdir()) == []

    def test_the_ledger_is_in_place_until_its_file_or_folder_is_deleted_or_replaced(self, tmp_path: Path) -> None:
        deleted, replaced, folderless = (
            Ledger(tmp_path / name, worker="host:w0:1:ab", slot="host:w0", slots=4) for name in "abc"
        )
        assert all(each.is_in_place for each in (deleted, replaced, folderless))

        deleted.path.unlink()
        replaced.path.with_suffix(".copy").write_bytes(replaced.path.read_bytes())
        replaced.path.with_suffix(".copy").rename(replaced.path)
        shutil.rmtree(folderless.path.parent)

        assert not any(each.is_in_place for each in (deleted, replaced, folderless))


LEDGER_FILES: Final = (ledger_module.__file__, ledger_format.__file__)


class TestDeathAtEveryStep:
    """Kills a worker before each line of the ledger's code that it executes."""

    @staticmethod
    def deaths(
        folder: Path, prepare: Act, act: Callable[[Ledger, int], object]
    ) -> Iterator[tuple[InFlightAttempt, ...]]:
        """Yields the ledger's content after each kill: before the first line of `act`, and so on until the last
        line."""
        for line in itertools.count(1):
            run = folder / str(line)
            pid = os.fork()
            if pid == 0:
                try:
                    ledger = Ledger(run, worker="w", slot="s", slots=1)
                    slot = prepare(ledger)
                    remaining = iter(range(line - 1, -1, -1))

                    def trace(frame: FrameType, event: str, _: object, left: Iterator[int] = remaining) -> Any:
                        if event == "line" and frame.f_code.co_filename in LEDGER_FILES and next(left) == 0:
                            os.kill(os.getpid(), signal.SIGKILL)
                        return trace

                    sys.settrace(trace)
                    act(ledger, slot)
                finally:
                    os._exit(0)
            if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0:
                return
            yield read(only_file(run)).attempts

    @pytest.mark.parametrize(
        ("prepare", "act", "least", "expected"),
        [
            (use, lambda ledger, _: leave(ledger), 6, [(), ((ID, None),)]),
            (
                used_before,
                lambda ledger, slot: ledger.mark_answered(slot, Rejected(Reason.REFUSED, "new"), finished_at=2.0),
                6,
                [((ID, None),)],
            ),
            (answered, lambda ledger, slot: ledger.clear(slot), 2, [((ID, Accepted("new")),), ()]),
        ],
        ids=["it marks an attempt as on the wire", "it stores an answer", "it clears a slot"],
    )
    def test_what_the_ledger_says_at_each_step(
        self, tmp_path: Path, prepare: Act, act: Callable[[Ledger, int], object], least: int, expected: list[Told]
    ) -> None:
        seen = [told(attempts) for attempts in self.deaths(tmp_path, prepare, act)]

        assert len(seen) >= least
        assert [attempts for attempts, _ in itertools.groupby(seen)] == expected


class TestTornWrites:
    """A process can be killed between any two bytes of a write. A reader then sees the slot as it was before or after
    the write, never a mixture."""

    @staticmethod
    def contents(folder: Path, act: Callable[[Ledger], object]) -> bytes:
        folder.mkdir()
        after(folder, act, slots=1)
        return only_file(folder).read_bytes()

    @staticmethod
    def torn(folder: Path, content: bytes) -> tuple[InFlightAttempt, ...]:
        path = folder / "torn.ledger"
        path.touch()
        inode = struct.pack("<Q", path.stat().st_ino)
        path.write_bytes(content[:INODE_AT] + inode + content[INODE_AT + 8 :])
        return read(path).attempts

    def torn_everywhere(self, folder: Path, before: bytes, written: bytes) -> list[tuple[InFlightAttempt, ...]]:
        """Reads the ledger at each point of a write, when some bytes are new and the state byte is still old."""
        state_at = HEADER_BYTES
        assert before[state_at] != written[state_at]
        body = range(state_at + 1, state_at + SLOT_BYTES)
        contents = {before[: state_at + 1] + written[state_at + 1 : cut] + before[cut:] for cut in body}
        assert len(contents) > 5
        return [self.torn(folder, content) for content in contents]

    @pytest.mark.parametrize(
        "acts",
        [
            (lambda _: None, leave),
            (use, used_before),
            (leave, answered),
            (used_before, lambda ledger: (use(ledger), answered(ledger))),
        ],
        ids=["a mark", "a mark of a used slot", "an answer", "an answer in a used slot"],
    )
    def test_a_torn_write_leaves_the_slot_as_it_was_before(self, tmp_path: Path, acts: tuple[Act, Act]) -> None:
        before, written = (self.contents(tmp_path / str(number), act) for number, act in enumerate(acts))
        states = [(), ((ID, None),), ((ID, Accepted("new")),)]
        state = int(acts[0] in (leave, used_before))

        assert {told(attempts) for attempts in self.torn_everywhere(tmp_path, before, written)} == {states[state]}
        assert told(self.torn(tmp_path, written)) == states[state + 1]

    def test_an_answer_is_never_combined_with_another_attempt(self, tmp_path: Path) -> None:
        # The relay may read while the worker writes. It may then see the old state and answer together with the new
        # attempt.
        older = self.contents(
            tmp_path / "1",
            lambda ledger: ledger.mark_answered(leave(ledger, OTHER_ID), Accepted("older"), finished_at=2.0),
        )
        newer = self.contents(tmp_path / "2", leave)
        answer_at = HEADER_BYTES + 96

        mixed = older[: HEADER_BYTES + 1] + newer[HEADER_BYTES + 1 : answer_at] + older[answer_at:]

        assert told(self.torn(tmp_path, mixed)) == ((ID, None),)


def flip(at: int, mask: int = 0x40) -> Callable[[bytearray], object]:
    def change(content: bytearray) -> None:
        content[at] ^= mask

    return change


def cut(octets: int) -> Callable[[bytearray], object]:
    return lambda content: content.__delitem__(slice(octets, None))


def later(at: int, value: bytes) -> Callable[[bytearray], object]:
    """Writes a value of a later release into the first slot, with correct checksums."""

    def change(content: bytearray) -> None:
        content[HEADER_BYTES + at : HEADER_BYTES + at + len(value)] = value
        begun = 0  # the checksum of the answer continues the checksum of the attempt
        for part, size in ((HEADER_BYTES + 8, 61), (HEADER_BYTES + 96, 369)):
            begun = crc32(content[part : part + size], begun)
            content[part + size : part + size + 4] = struct.pack("<I", begun)

    return change


def bind(path: Path) -> None:
    """Makes a socket at this path, whose length is limited."""
    with socket.socket(socket.AF_UNIX) as listener, contextlib.chdir(path.parent):
        listener.bind(path.name)


class TestInvalidLedgerFiles:
    """Invalid files are reported as unreadable and never changed."""

    @pytest.fixture
    def good(self, tmp_path: Path) -> Path:
        folder = tmp_path / "run"
        after(folder, lambda ledger: ledger.mark_answered(leave(ledger), Rejected(Reason.REFUSED), finished_at=2.0))
        return only_file(folder)

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            *((flip(at), None) for at in (12, 16, 40, 90, 150)),  # the header
            *((cut(octets), None) for octets in (1, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 4 * SLOT_BYTES - 1)),
            (later(96 + 8, b"\x09"), "a value that this release does not know"),  # the outcome
            (later(96 + 17, b"late"), "a value that this release does not know"),  # the reason
            (later(8 + 36, b"\x09"), "a value that this release does not know"),  # the policy
            (flip(8, FORMAT ^ FORMAT + 1), f"has format {FORMAT + 1}, and this release reads only"),
        ],
    )
    def test_damaged_truncated_or_of_a_later_release(
        self, good: Path, change: Callable[[bytearray], object], words: str | None
    ) -> None:
        content = bytearray(good.read_bytes())
        change(content)
        good.write_bytes(content)

        with pytest.raises(LedgerUnreadable, match=words):
            read(good)

    @pytest.mark.parametrize("replaces", [False, True], ids=["beside the original", "in its place"])
    def test_a_copy(self, good: Path, replaces: bool) -> None:
        # No process locks the copy of a live worker's ledger, so the copy would look like a dead worker's ledger.
        copy = good.with_suffix(".copy.ledger")
        copy.write_bytes(good.read_bytes())

        with pytest.raises(LedgerUnreadable, match="a copy of the ledger of"):
            read(copy.rename(good) if replaces else copy)
        assert replaces or read(good).attempts

    @pytest.mark.parametrize(
        ("make", "words"),
        [
            *(
                pytest.param(partial(Path.write_bytes, data=content), None, id=name)
                for name, content in {
                    "empty": b"",
                    "magic alone": b"EDLEDGER",
                    "zeros": b"\0" * 4096,
                    "foreign": b"%PDF-1.7" + bytes(1000),
                    "no header": b"EDLEDGER" + bytes(1000),
                    "noise": os.urandom(4096),
                }.items()
            ),
            pytest.param(Path.mkdir, "cannot be read", id="a folder"),
            pytest.param(os.mkfifo, "it is not a regular file", id="a pipe"),
            pytest.param(bind, "cannot be opened", id="a socket"),
            pytest.param(lambda path: path.symlink_to("/dev/zero"), "it is not a regular file", id="an endless device"),
            # This file has a size, but reading it fails.
            pytest.param(
                lambda path: path.symlink_to("/sys/class/net/lo/speed"), "cannot be read: Invalid argument", id="faulty"
            ),
            pytest.param(lambda path: path.symlink_to(path.name), "cannot be opened", id="a loop of links"),
        ],
    )
    def test_foreign(self, tmp_path: Path, make: Callable[[Path], object], words: str | None) -> None:
        path = tmp_path / "x.ledger"
        make(path)
        before = words or path.read_bytes()

        with pytest.raises(LedgerUnreadable, match=words):
            read(path)

        assert before == words or path.read_bytes() == before

    def test_the_same_checks_apply_to_the_ledger_of_a_live_worker(self, good: Path) -> None:
        assert living_ledger(good) == LivingLedger(good, "host:w0:17:cafe", "host:w0", DATABASE_ID)
        assert living_ledger(good.with_name("gone.ledger")) is None
        os.truncate(good, 100)
        with pytest.raises(LedgerUnreadable):
            living_ledger(good)


texts = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=400)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(detail=texts, code=texts, message_id=texts)
def test_long_texts_are_truncated_between_characters(tmp_path: Path, detail: str, code: str, message_id: str) -> None:
    folder = tmp_path / os.urandom(8).hex()

    def work(ledger: Ledger) -> None:
        ledger.mark_answered(leave(ledger), Accepted(message_id, detail), finished_at=2.0)
        ledger.mark_answered(leave(ledger), Uncertain(detail, code), finished_at=2.0)

    first, second = after(folder, work).attempts

    assert isinstance(first.outcome, Accepted)
    assert isinstance(second.outcome, Uncertain)
    for kept, given_text, octets in (
        (first.outcome.provider_message_id, message_id, 128),
        (first.outcome.detail, detail, 160),
        (second.outcome.detail, detail, 160),
        (second.outcome.code, code, 32),
    ):
        words = kept or ""
        assert given_text.startswith(words)
        assert len(words.encode()) <= octets
        assert len(words.encode()) > octets - 4 or words == given_text


def test_the_bytes_of_this_format_never_change(tmp_path: Path) -> None:
    """A relay may read a ledger that a worker of a different release wrote. So every change of the layout needs a new
    FORMAT."""

    def work(ledger: Ledger) -> None:
        leave(ledger)
        ledger.mark_answered(leave(ledger, OTHER_ID), Deferred(Reason.THROTTLED, "wait", "429", 2.5), finished_at=2.0)
        ledger.begin_rendering(ID, 7)
        living = living_ledger(ledger.path)
        assert living is not None
        living.void_leases(12.5)

    after(tmp_path, work, slots=2)
    path = only_file(tmp_path)

    def attempt(email_id: UUID) -> bytes:
        return struct.pack("<16sqidB24s", email_id.bytes, 7, 3, 1_790_000_000.25, 0, b"smtp")

    def checked(part: bytes, begun: int = 0) -> bytes:
        return part + struct.pack("<I", crc32(part, begun))

    names = (b"host:w0:17:cafe", b"host:w0", boot_id().encode())
    header = struct.pack("<8sHHI64s64s36s", b"EDLEDGER", 4, 512, 2, *names)
    header += struct.pack("<I", crc32(repr((b"EDLEDGER", 4, 512, 2, *names)).encode()))
    header += struct.pack("<Qd", path.stat().st_ino, 12.5)
    header += bytes(11 * 24) + struct.pack("<16sq", ID.bytes, 7) + checked(DATABASE_ID.bytes)
    on_the_wire = b"\1".ljust(8, b"\0") + checked(attempt(ID))
    answer = struct.pack("<dBd32s32s128s160s", 2.0, 1, 2.5, b"throttled", b"429", b"", b"wait")
    answered = (b"\2".ljust(8, b"\0") + checked(attempt(OTHER_ID))).ljust(96, b"\0") + checked(
        answer, crc32(attempt(OTHER_ID))
    )
    assert path.read_bytes() == b"".join(part.ljust(512, b"\0") for part in (header, on_the_wire, answered))


FORMAT_3: Final = Path(__file__).with_name("format_3.ledger")
"""Written by the last release with format 3, in a worker that exited with three attempts, and with an email that it was
rendering."""


def test_a_ledger_of_the_previous_format_is_read(tmp_path: Path) -> None:
    path = tmp_path / "host:w0:17:cafe.ledger"
    path.write_bytes(FORMAT_3.read_bytes())
    with path.open("r+b") as file:
        file.seek(INODE_AT)
        file.write(struct.pack("<Q", path.stat().st_ino))  # otherwise it would count as a copy

    dead, living = read(path), living_ledger(path)

    def attempt(number: int, policy: OnUncertain, *answer: Any) -> InFlightAttempt:
        email_id = UUID(f"018f3a1e-7b5c-7def-8abc-{number:012x}")
        return InFlightAttempt(email_id, 6 + number, 2, "smtp", 1_790_000_000.25, policy, *answer)

    deferred = Deferred(Reason.RECIPIENT_DEFERRED, "4.7.1 slow down", "451 4.7.1", 2.5)
    attempts = (
        attempt(1, OnUncertain.HOLD),
        attempt(2, OnUncertain.RESEND, 1_790_000_001.5, Accepted("<018f@example.com>", "250 2.0.0 queued")),
        attempt(3, OnUncertain.HOLD, 1_790_000_002.5, deferred),
    )
    assert living is not None
    assert (living.worker, living.slot, living.database_id) == ("host:w0:17:cafe", "slot-1", None)
    assert dead.attempts == living.attempts() == attempts
    assert dead.suspects == (RenderSuspect(UUID("018f3a1e-7b5c-7def-8abc-000000000004"), 10),)
    assert not dead.is_complete  # the host has rebooted since
