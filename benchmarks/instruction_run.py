"""Runs `dispatcher` so that `instruction_processes.py` can separate the counts of its processes.

    python -P instruction_run.py FOLDER ARGUMENTS…

After each fork, the parent and the child mark the end of a part (see `instruction_loads.py`), and later a child does so
at each SIGUSR2. Then it writes its role to the file `FOLDER/PID.NUMBER`, so that the sender of the signal can continue.
"""

from __future__ import annotations

import os
import signal
import sys
from itertools import count
from pathlib import Path
from typing import Final

from setproctitle import getproctitle

from dispatcher.cli.main import main
from dispatcher.store import connections

CONNECT_SECONDS: Final = 300
"""Under callgrind, a process needs fifty times as long to connect. A second attempt would be counted, too."""
FOLDER: Final = Path(sys.argv[1])
_MARKS: Final = count(1)


def _mark(*_: object) -> None:
    os.ctermid()
    part = FOLDER / f"{os.getpid()}.part"
    part.write_text(getproctitle().removeprefix("dispatcher: ").split()[0])
    part.rename(FOLDER / f"{os.getpid()}.{next(_MARKS)}")


if __name__ == "__main__":
    connections.__dict__["CONNECT_SECONDS"] = connections.__dict__["_OPTIONS"]["connect_timeout"] = CONNECT_SECONDS
    signal.signal(signal.SIGUSR2, _mark)
    os.register_at_fork(after_in_parent=os.ctermid, after_in_child=os.ctermid)
    sys.exit(main(sys.argv[2:]))
