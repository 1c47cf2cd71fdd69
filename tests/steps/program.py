"""`dispatcher run` whose processes die where they are told to: `python -m tests.steps.program FOLDER SEED`.

Started as its own program, by `tests.steps.proof`; settings come from the environment as ever.
"""

from __future__ import annotations

import sys
from pathlib import Path

from dispatcher.cli.main import main
from tests.steps.aims import Range, arm

if __name__ == "__main__":
    arm(Range(Path(sys.argv[1]), int(sys.argv[2])))
    sys.exit(main(["run"]))
