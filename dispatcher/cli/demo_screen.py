"""The demo as it goes on: bars on a terminal, a line now and then elsewhere. All of it goes to stderr."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from dispatcher.cli.output import console_for, say
from dispatcher.domain.status import Status

if TYPE_CHECKING:
    from rich.progress import Progress

    from dispatcher.dev.demo import Scene, Screen

_LINE_SECONDS: Final = 1.0


@contextmanager
def open_screen() -> Iterator[Screen]:
    """A screen that fits where stderr goes."""
    if not sys.stderr.isatty():
        yield PlainScreen()
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    name, words = TextColumn("{task.description}"), TextColumn("{task.fields[words]}")
    with Progress(name, BarColumn(), MofNCompleteColumn(), words, console=console_for(sys.stderr)) as progress:
        yield BarScreen(progress)


class PlainScreen:
    """Lines."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def say(self, words: str) -> None:
        """One line."""
        say(words)

    def show(self, scene: Scene) -> None:
        """A line once a second."""
        if scene.seconds - self._seconds >= _LINE_SECONDS:
            self._seconds = scene.seconds
            say(f"{scene.finished} of {scene.emails}: {_describe(scene)}")


class BarScreen:
    """Two bars, with the lines above them."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._enqueued = progress.add_task("enqueued", total=None, visible=False, words="")
        self._finished = progress.add_task("finished", total=None, visible=False, words="")

    def say(self, words: str) -> None:
        """One line above the bars."""
        self._progress.console.print(words, markup=False, soft_wrap=True)

    def show(self, scene: Scene) -> None:
        """Moves the bars."""
        self._progress.update(self._enqueued, total=scene.emails, completed=scene.enqueued, visible=True)
        words = _describe(scene)
        self._progress.update(self._finished, total=scene.emails, completed=scene.finished, visible=True, words=words)


def _describe(scene: Scene) -> str:
    """The statuses that any email has."""
    return ", ".join(f"{scene.counts[status]} {status}" for status in reversed(Status) if scene.counts[status])
