"""`dispatcher run` whose processes end where they are told to: `python -m tests.steps.program FOLDER SEED SIGNAL`.

Started as its own program, by `proof` and `frozen`; settings come from the environment as ever.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from dispatcher.cli.main import main
from tests.steps.aims import Range, arm

if __name__ == "__main__":
    folder, seed, name = sys.argv[1:]
    arm(Range(Path(folder), int(seed), signal.Signals[name]))
    sys.exit(main(["run"]))
