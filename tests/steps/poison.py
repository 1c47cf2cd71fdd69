"""Runs `dispatcher run` with workers that die while they render one email: `python -m tests.steps.poison FILE`.

FILE contains the email's id. The worker dies without a log message, as after a crash in native code or a lack of
memory.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from uuid import UUID

from dispatcher.cli.main import main
from dispatcher.transport import mime


def inject_faults(poison: UUID) -> None:
    """Patches this process, and thereby all processes that it forks."""
    fields = vars(mime)["_fields"]

    def fields_or_death(email: object, *others: object) -> object:
        if getattr(email, "email_id", None) == poison:
            os.kill(os.getpid(), signal.SIGKILL)
        return fields(email, *others)

    vars(mime)["_fields"] = fields_or_death


if __name__ == "__main__":
    inject_faults(UUID(Path(sys.argv[1]).read_text()))
    sys.exit(main(["run"]))
