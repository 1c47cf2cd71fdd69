"""What becomes of the log's reader is no business of the emails."""

from __future__ import annotations

import os
from pathlib import Path

from tests.acceptance.harness import Host, emails, stop


def test_a_reader_that_is_stuck_stops_no_email(host: Host, tmp_path: Path) -> None:
    pipe = tmp_path / "log"
    os.mkfifo(pipe)
    stuck = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    ids = host.enqueue(emails(4000))

    run = host.run(stdout=pipe)

    books = host.await_finished(ids)
    assert run.exit_code is None
    os.close(stuck)
    stop(run)
    books.assert_balanced()
    assert books.counts == {"sent": 4000}
