"""Prints the man page dispatcher(1): the help of every command, from the commands themselves."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime

import click

from dispatcher.cli.main import dispatcher
from dispatcher.version import VERSION

HEAD = r""".TH DISPATCHER 1 "{date}" "Email Dispatcher {version}" "Email Dispatcher"
.ad l
.SH NAME
dispatcher \- send transactional email in the background, without losing an email or sending one twice
.SH SYNOPSIS
"""
FILES = r""".SH FILES
.TP
.I /etc/email-dispatcher/dispatcher.env
The settings of
.BR "dispatcher run" ,
each with its meaning. Name the file with
.B \-\-env\-file
or
.BR DISPATCHER_ENV_FILE .
.TP
.I /etc/email-dispatcher/dispatcher-api.env
The settings of
.BR "dispatcher api" .
.TP
.I /var/lib/email-dispatcher
The run directory. It contains the in\-flight ledgers: do not delete them.
"""


def escaped(text: str) -> str:
    """The text for troff: a hyphen stays a hyphen, a line may end after a |, and no line begins with a request."""
    plain = text.replace("\\", r"\e").replace("-", r"\-").replace("|", r"|\:")
    return re.sub(r"^(?=['.])", r"\\&", plain, flags=re.MULTILINE)


class ManFormatter(click.HelpFormatter):
    """Formats a command's help as troff, where click would format it for a terminal."""

    def write_usage(self, prog: str, args: str = "", prefix: str | None = None) -> None:  # noqa: ARG002 - click's
        self.write(f".B {escaped(prog)}\n{escaped(args)}\n")

    def write_heading(self, heading: str) -> None:
        self.write(f".B {escaped(heading)}\n")

    def write_paragraph(self) -> None:
        self.write(".PP\n")

    def write_text(self, text: str) -> None:
        for number, paragraph in enumerate(re.split(r"\n{2,}", text.strip("\n"))):
            self.write(".PP\n" if number else "")
            kept = paragraph.removeprefix("\b\n")
            if kept == paragraph:
                self.write(escaped(" ".join(paragraph.split())) + "\n")
            else:
                self.write(f".nf\n{escaped(kept)}\n.fi\n")

    def write_dl(self, rows: Iterable[tuple[str, str]], col_max: int = 30, col_spacing: int = 2) -> None:  # noqa: ARG002
        for term, about in rows:
            text = escaped(" ".join(about.split())) or r"\&"
            self.write(f".TP\n.B {escaped(term)}\n{text}\n")


def contexts(command: click.Command, name: str, parent: click.Context | None = None) -> Iterator[click.Context]:
    """The command's context, then those of its subcommands."""
    context = click.Context(command, info_name=name, parent=parent)
    yield context
    if isinstance(command, click.Group):
        for each in command.list_commands(context):
            found = command.get_command(context, each)
            if found is not None and not found.hidden:
                yield from contexts(found, each, context)


def page(on: datetime) -> str:
    """The man page, with the date of this instant."""
    root, *others = contexts(dispatcher, "dispatcher")
    parts = [HEAD.format(date=on.date(), version=VERSION)]
    for context in (root, *others):
        formatter = ManFormatter()
        if context is root:
            formatter.write(".B dispatcher\n[OPTIONS] COMMAND [ARGUMENTS]\n.SH DESCRIPTION\n")
            context.command.format_help_text(context, formatter)
        else:
            formatter.write(f'.SS "{escaped(context.command_path)}"\n')
            context.command.format_usage(context, formatter)
            context.command.format_help_text(context, formatter)
        context.command.format_options(context, formatter)
        context.command.format_epilog(context, formatter)
        parts.append(formatter.getvalue())
        if context is root:
            parts.append(".SH COMMANDS\n")
    return "".join([*parts, FILES])


if __name__ == "__main__":
    print(page(datetime.fromtimestamp(int(sys.argv[1]), UTC)), end="")
