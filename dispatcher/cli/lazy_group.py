"""A group of commands of which only the one that is called gets loaded: half of what a command takes is its imports."""

from __future__ import annotations

import gc
from collections.abc import Collection, Mapping
from importlib import import_module
from typing import Any

import click

from dispatcher.cli.env_file import take_env_file


class LazyGroup(click.Group):
    """A group whose commands load when they are called, each with the option `--env-file`.

    Args:
        parts: Where each is (`module:function` of this package) and what it does, by name, in the order of `--help`.
        brief: Those that end soon: their garbage ends with the process, and that without a tidying up.
    """

    def __init__(
        self, *arguments: Any, parts: Mapping[str, tuple[str, str]], brief: Collection[str] = (), **options: Any
    ) -> None:
        super().__init__(*arguments, **options)
        self.parts = parts
        self._brief = brief

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        """Names for `--help`."""
        return list(self.parts)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 - click's signature
        """The command of that name, loaded now."""
        if cmd_name not in self.parts:
            return None
        if cmd_name in self._brief:
            gc.disable()
        module, _, function = self.parts[cmd_name][0].partition(":")
        command: click.Command = getattr(import_module(f"dispatcher.cli.{module}"), function)
        take_env_file(command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click does it, and names what is close to a name that there is not."""
        try:
            return super().resolve_command(ctx, args)
        except click.exceptions.NoSuchCommand as error:
            raise click.exceptions.NoSuchCommand(error.command_name, possibilities=self.parts, ctx=ctx) from error

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """The list in `--help`, without loading what it lists."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, about) for name, (_, about) in self.parts.items()])
