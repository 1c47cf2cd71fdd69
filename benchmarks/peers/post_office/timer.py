"""The equivalent of cron: `python -m benchmarks.peers.post_office.timer PROCESSES` sends queued emails every second.

The command exits when no email is due. Emails that must be retried wait for the command's next run. This program runs
until it gets a signal.
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
