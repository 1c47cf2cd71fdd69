"""What cron does, each second: `python -m benchmarks.peers.post_office.timer PROCESSES` sends what is queued, for ever.

The command ends when nothing is due; what is tried again later waits for its next run.
"""

from __future__ import annotations

import sys
import time

import django
from django.core.management import call_command

SECONDS = 1.0


def main() -> None:
    """The command line."""
    django.setup()
    while True:
        call_command("send_queued_mail", processes=int(sys.argv[1]))
        time.sleep(SECONDS)


if __name__ == "__main__":
    main()
