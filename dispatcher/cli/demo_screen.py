"""The demo as it goes on: a bar on a terminal, a line now and then elsewhere. All of it goes to stderr."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import click

from dispatcher.cli.output import say
from dispatcher.domain.status import Status

if TYPE_CHECKING:
    from click._termui_impl import ProgressBar

    from dispatcher.dev.demo import Scene

_LINE_SECONDS: Final = 1.0


class DemoScreen:
    """Shows what happens."""

    def __init__(self, bar: ProgressBar[Any] | None) -> None:
        self._bar = bar
        self._seconds = 0.0

    def say(self, words: str) -> None:
        """One line, above the bar."""
        if self._bar is not None:
            sys.stderr.write("\r\x1b[K")
        say(words)

    def show(self, scene: Scene) -> None:
        """Moves the bar, or writes a line once a second."""
        if self._bar is not None:
            self._bar.length = scene.emails
            self._bar.update(scene.finished - self._bar.pos, scene)
        elif scene.seconds - self._seconds >= _LINE_SECONDS:
            self._seconds = scene.seconds
            say(f"{scene.finished} of {scene.emails}: {_describe(scene)}")


@contextmanager
def open_screen(emails: int) -> Iterator[DemoScreen]:
    """A screen that fits where stderr goes."""
    if not sys.stderr.isatty():
        yield DemoScreen(None)
        return
    with click.progressbar(
        length=emails, label="finished", show_pos=True, show_eta=False, item_show_func=_describe, file=sys.stderr
    ) as bar:
        yield DemoScreen(bar)


def _describe(scene: Scene | None) -> str:
    """The statuses that any email has."""
    return (
        ", ".join(f"{scene.counts[status]} {status}" for status in reversed(Status) if scene.counts[status])
        if scene
        else ""
    )
