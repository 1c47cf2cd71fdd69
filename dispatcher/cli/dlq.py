"""`dispatcher dlq`: the commands for dead letters: failed emails, held emails, and poison messages."""

from __future__ import annotations

from typing import Final

import click

from dispatcher.cli.lazy_group import LazyGroup

PARTS: Final = {
    "list": ("dlq_list:list_", "List failed and held emails, or count them by cause."),
    "show": ("show:command", "The same as `dispatcher show`."),
    "replay": ("dlq_replay:replay", "Send failed emails again: by ids, by a filter, or the whole DLQ."),
    "replays": ("dlq_list:replays", "List replays: operator, reason, progress."),
    "stop": ("dlq_list:stop", "Stop a running replay."),
    "discard": ("dlq_list:discard", "Remove dead letters from the DLQ for good, without sending."),
    "reconcile": ("dlq_list:reconcile", "Compare the DLQ with the database, and repair the differences."),
}


@click.group("dlq", cls=LazyGroup, parts=PARTS, uncollected=("list", "show"))
def command() -> None:
    """Inspect and replay dead letters: messages about failed or held emails, and poison messages (which point to no
    email).

    \b
    Examples, in the order of an investigation:
      dispatcher dlq list --by error_type         # count by cause
      dispatcher dlq list --error-type refused    # list the emails with this cause
      dispatcher show ID                          # the full history of one email
      dispatcher dlq replay --error-type refused --reason "IP is off the blocklist"
      dispatcher dlq reconcile                    # do the DLQ and the database agree?

    Failed and held emails stay in the database. Each of these emails has a dead letter on the DLQ, the dead-letter
    queue in RabbitMQ. While the DLQ is not empty, the monitor raises an alert. None of these commands sends an email
    with the status `sent` again.
    """
