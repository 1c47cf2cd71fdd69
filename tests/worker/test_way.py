"""ARCHITECTURE.md lists the files on the path of a SendGrid email in the order in which the email passes them."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Final

import dispatcher
from tests.providers.sendgrid_place import sendgrid_place
from tests.waiting import until
from tests.worker.bench import Bench

PAGE: Final = Path(__file__).parents[2] / "ARCHITECTURE.md"
FILE: Final = re.compile(r"^\d+ +([a-z_/]+\.py) ", re.MULTILINE)
ROOT: Final = Path(dispatcher.__file__).parent
FIRST_OF_COROUTINE: Final = 16
"""A call event beyond this byte-code offset resumes a coroutine. It does not count as a new call."""
HELPERS: Final = {
    f"worker/{name}.py" for name in ("window", "controls", "lane_inbox", "report", "outage", "suppression")
}


@contextmanager
def files_called() -> Iterator[dict[str, None]]:
    """Collects the files of the package whose functions are called during the block, in the order of their first
    call."""
    files: dict[str, None] = {}

    def note(frame: FrameType, event: str, _: object) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(str(ROOT)) and frame.f_lasti <= FIRST_OF_COROUTINE:
            files.setdefault(str(Path(name).relative_to(ROOT)))

    sys.setprofile(note)
    try:
        yield files
    finally:
        sys.setprofile(None)


async def test_a_sendgrid_email_passes_the_workers_files_in_the_documented_order(bench: Bench, tmp_path: Path) -> None:
    async with sendgrid_place(tmp_path / "double") as place:
        worker = await bench.start([place.provider])
        await bench.enqueue()
        await bench.settled({"sent": 1})  # opens connections, prepares statements and imports modules
        await until(lambda: worker.in_flight == 0)

        with files_called() as files:
            await bench.enqueue()
            await bench.settled({"sent": 2})
            await until(lambda: worker.in_flight == 0)

    documented = FILE.findall(PAGE.read_text())
    assert len(documented) == 15
    assert [file for file in files if file in documented] == [
        file for file in documented if not file.startswith("relay/")
    ]
    assert {file for file in files if file.startswith("worker/")} - set(documented) <= HELPERS
