"""`dispatcher run` whose workers die of one email: `python -m tests.steps.poison FILE`, in which its id stands.

As of an error in native code, or for want of memory: while the email is rendered, without a word.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from uuid import UUID

from dispatcher.cli.main import main
from dispatcher.transport import mime


def arm(poison: UUID) -> None:
    """Alters this process, and whatever it forks."""
    other_fields = vars(mime)["_other_fields"]

    def fields_or_death(email: object, domain: str) -> object:
        if getattr(email, "email_id", None) == poison:
            os.kill(os.getpid(), signal.SIGKILL)
        return other_fields(email, domain)

    vars(mime)["_other_fields"] = fields_or_death


if __name__ == "__main__":
    arm(UUID(Path(sys.argv[1]).read_text()))
    sys.exit(main(["run"]))
