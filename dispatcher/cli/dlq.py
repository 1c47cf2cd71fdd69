"""`dispatcher dlq`: what failed or is held, why, and what to do about it."""

from __future__ import annotations

from typing import Final

import click

from dispatcher.cli.lazy_group import LazyGroup

PARTS: Final = {
    "list": ("dlq_list:list_", "List what failed or is held, or count it by cause."),
    "show": ("dlq_show:show", "Tell one email's whole story, or show a poison message's bytes."),
    "replay": ("dlq_replay:replay", "Send failed emails again: by ids, by a filter, or the whole DLQ."),
    "replays": ("dlq_replay:replays", "List replays: who, why, and how far they are."),
    "stop": ("dlq_replay:stop", "Let a replay go no further."),
    "discard": ("dlq_letters:discard", "Take dead letters off the DLQ for good, without sending anything."),
    "reconcile": ("dlq_letters:reconcile", "Compare the DLQ with the database, and mend the differences."),
}


@click.group("dlq", cls=LazyGroup, parts=PARTS, brief=("list", "show"))
def command() -> None:
    """Dead letters: emails that failed or are held, and messages behind which there is no email.

    What failed stands in the database, and its dead letter on the DLQ, so that somebody is told. Nothing here sends
    again what was sent.

    \b
    Examples, as a way through:
      dispatcher dlq list --by error_type               what happened
      dispatcher dlq list --error-type refused          to which emails
      dispatcher dlq show ID                            one email's whole story
      dispatcher dlq replay --error-type refused --reason "IP is off the blocklist"
      dispatcher dlq reconcile                          do the DLQ and the database agree?
    """
