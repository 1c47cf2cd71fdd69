"""`dispatcher completion`: prints the script with which a shell completes commands and options."""

from __future__ import annotations

from typing import Final

import click
from click.shell_completion import BashComplete, FishComplete, ShellComplete, ZshComplete

from dispatcher.cli.exits import Exit
from dispatcher.cli.output import print_data

_SHELLS: Final[dict[str, type[ShellComplete]]] = {"bash": BashComplete, "zsh": ZshComplete, "fish": FishComplete}


@click.command("completion")
@click.argument("shell", type=click.Choice(list(_SHELLS)))
@click.pass_context
def command(ctx: click.Context, shell: str) -> int:
    """Print the script with which a shell completes commands and options with the Tab key.

    \b
    Examples:
      echo 'eval "$(dispatcher completion bash)"' >> ~/.bashrc
      echo 'eval "$(dispatcher completion zsh)"' >> ~/.zshrc
      dispatcher completion fish > ~/.config/fish/completions/dispatcher.fish
    """
    script = _SHELLS[shell](ctx.find_root().command, {}, "dispatcher", "_DISPATCHER_COMPLETE")
    print_data(script.source().rstrip())
    return Exit.DONE
