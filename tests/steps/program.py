"""Runs `dispatcher run` with injected faults. Settings come from the environment, as usual.

python -m tests.steps.program FOLDER SEED SIGNAL    kills or freezes processes at every step (see `kill_points`)
python -m tests.steps.program EMAIL_ID              workers die while they render this email, without a log message,
                                                    as after a crash in native code or a lack of memory
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from uuid import UUID

from dispatcher.cli.main import main
from dispatcher.transport import mime
from tests.steps.kill_points import KillPlan, inject_faults


def die_while_rendering(poison: UUID) -> None:
    """Patches this process, and thereby all processes that it forks."""
    fields = vars(mime)["_fields"]

    def fields_or_death(email: object, *others: object) -> object:
        if getattr(email, "email_id", None) == poison:
            os.kill(os.getpid(), signal.SIGKILL)
        return fields(email, *others)

    vars(mime)["_fields"] = fields_or_death


if __name__ == "__main__":
    if len(sys.argv) == 2:
        die_while_rendering(UUID(sys.argv[1]))
    else:
        folder, seed, name = sys.argv[1:]
        inject_faults(KillPlan(Path(folder), int(seed), signal.Signals[name]))
    sys.exit(main(["run"]))
