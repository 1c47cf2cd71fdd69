"""A command group that imports only the command that is called: imports take half of a command's run time."""

from __future__ import annotations

import gc
from collections.abc import Collection, Mapping
from importlib import import_module
from typing import Any

import click

from dispatcher.cli.env_file import add_env_file_option


class LazyGroup(click.Group):
    """A group that imports a command when it is called, and adds the option `--env-file` to it.

    `parts` has the commands in the order of `--help`: for each name, where its function is (`module:function` in this
    package) or the module with its actions, and a summary. The commands in `uncollected` start without garbage
    collection, because imports create many objects and almost no garbage. `run` enables it before the first fork; the
    other commands end soon.
    """

    def __init__(
        self, *arguments: Any, parts: Mapping[str, tuple[str, str]], uncollected: Collection[str] = (), **options: Any
    ) -> None:
        super().__init__(*arguments, **options)
        self.parts = parts
        self._uncollected = uncollected

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return list(self.parts)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 - click's signature
        if cmd_name not in self.parts:
            return None
        if cmd_name in self._uncollected:
            gc.disable()
        module, _, function = self.parts[cmd_name][0].partition(":")
        command: click.Command
        if function:
            command = getattr(import_module(f"dispatcher.cli.{module}"), function)
        else:
            subject = import_module(f"dispatcher.{module}")
            command = import_module("dispatcher.cli.batch_face").command_of(subject, cmd_name)
        add_env_file_option(command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click does; for an unknown name, the error suggests similar names."""
        try:
            return super().resolve_command(ctx, args)
        except click.exceptions.NoSuchCommand as error:
            raise click.exceptions.NoSuchCommand(error.command_name, possibilities=self.parts, ctx=ctx) from error

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """Writes the list of commands for `--help` without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, about) for name, (_, about) in self.parts.items()])
