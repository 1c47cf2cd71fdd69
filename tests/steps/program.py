"""Runs `dispatcher run`, and kills or freezes its processes at every step (see `kill_points`):
`python -m tests.steps.program FOLDER SEED SIGNAL`. Settings come from the environment, as usual."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from dispatcher.cli.main import main
from tests.steps.kill_points import KillPlan, inject_faults

if __name__ == "__main__":
    folder, seed, name = sys.argv[1:]
    inject_faults(KillPlan(Path(folder), seed, signal.Signals[name]))
    sys.exit(main(["run"]))
