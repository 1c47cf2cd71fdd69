"""`dispatcher resend`: takes the email's message key, too, and asks before it may repeat an email."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import click

from dispatcher.actions.action import Refused
from dispatcher.actions.resend import Resend
from dispatcher.cli import face
from dispatcher.cli.environment import load_settings
from dispatcher.cli.exits import Exit
from dispatcher.cli.options import confirm
from dispatcher.cli.output import print_data, print_json, say
from dispatcher.cli.sessions import one_session
from dispatcher.domain.email_history import Resent


def _resend(*, email_id: str, actor: str | None, as_json: bool, **given: Any) -> int:
    asked = face.read_options(Resend, {**given, "email_id": str(UUID(int=0))})
    from dispatcher.actions.runner import Face, Who, run
    from dispatcher.ops.names import find_id

    settings = load_settings("database_url")
    with one_session("resend", settings) as on_session, face.in_words(Resend):
        found = on_session(lambda session: find_id(session, email_id, tenant_id=asked.tenant_id))

        def make(asked: Resend) -> Resent:
            return on_session(lambda session: run(session, asked, Who(Face.COMMAND, actor), settings))

        asked = asked.but(email_id=found)
        try:
            made = make(asked)
        except Refused as error:
            if error.name != "may_repeat":
                raise
            say(error.message)
            confirm("Resend it?", yes=False)
            made = make(asked.but(may_repeat=True))
    if as_json:
        print_json(made)
    else:
        print_data(f"{made.describe()}.")
    return Exit.DONE


command = face.command(Resend)
command.params[0] = click.Argument(["email_id"], metavar="ID|KEY")
command.callback = _resend
