"""ARCHITECTURE.md lists the files on the path of a SendGrid email in the order in which the email passes them."""

from __future__ import annotations

import re
from pathlib import Path

from tests.providers.sendgrid_place import sendgrid_place
from tests.waiting import until
from tests.worker.bench import Bench
from tests.worker.way import in_order, way

PAGE = Path(__file__).parents[2] / "ARCHITECTURE.md"
FILE = re.compile(r"^\d+ +([a-z_/]+\.py) ", re.MULTILINE)


async def test_a_sendgrid_email_passes_the_workers_files_in_the_documented_order(bench: Bench, tmp_path: Path) -> None:
    async with sendgrid_place(tmp_path / "double") as place:
        worker = await bench.start([place.provider])
        await bench.enqueue()
        await bench.settled({"sent": 1})  # opens connections, prepares statements and imports modules
        await until(lambda: worker.in_flight == 0)

        with way() as stays:
            await bench.enqueue()
            await bench.settled({"sent": 2})
            await until(lambda: worker.in_flight == 0)

    documented = FILE.findall(PAGE.read_text())
    print(*stays, sep="\n")
    assert len(documented) == 15
    named = [file for file in in_order(stays) if file in documented]
    assert named == [file for file in documented if not file.startswith("relay/")]
    assert set(in_order(stays, "worker/")) - set(documented) <= {
        "worker/window.py",
        "worker/controls.py",
        "worker/lane_inbox.py",
        "worker/report.py",
        "worker/outage.py",
        "worker/suppression.py",
    }
