"""What `dispatcher run` checks and sets before it starts processes: the run directory, and the limit of open files.

A user who can write ledgers into the run directory decides which emails count as sent.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from dispatcher.errors import ConfigurationError
from dispatcher.supervisor.run_dir import make_run_dir, run_dir_fault


def folder(path: Path, mode: int) -> Path:
    path.mkdir(parents=True)
    path.chmod(mode)
    return path


def link(path: Path, target: Path) -> Path:
    target.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)
    return path


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda tmp: folder(tmp / "run", 0o700), None),
        (lambda tmp: folder(tmp / "run", 0o755), None),
        (lambda tmp: folder(tmp / "run", 0o770), "is writable by its group"),
        (lambda tmp: folder(tmp / "run", 0o702), "is writable by every user"),
        (lambda tmp: link(tmp / "run", tmp / "elsewhere"), "is a symbolic link"),
        (lambda tmp: link(tmp / "run", tmp / "gone" / ".." / "elsewhere"), "is a symbolic link"),
        (lambda tmp: link(tmp / "ours", tmp / "elsewhere") / "run", None),
        (lambda tmp: folder(tmp / "open", 0o777) / "run", "which every user of this host may write"),
        (lambda tmp: folder(tmp / "sticky", 0o1777) / "run", "which every user of this host may write"),
        (lambda tmp: folder(tmp / "open", 0o777) / "between" / "run", "which every user of this host may write"),
        (lambda tmp: folder(tmp / "sticky", 0o1777) / "between" / "run", None),
        (lambda tmp: link(tmp / "ours", folder(tmp / "open", 0o777)) / "run", "which every user of this host may"),
    ],
)
def test_a_run_directory_that_others_can_write_or_replace_is_refused_with_a_remedy(
    make: Callable[[Path], Path], words: str | None, tmp_path: Path
) -> None:
    run_dir = make(tmp_path)

    if words is None:
        make_run_dir(run_dir)
        return
    with pytest.raises(ConfigurationError) as raised:
        make_run_dir(run_dir)

    (mistake,) = raised.value.mistakes
    assert mistake.startswith(f"DISPATCHER_RUN_DIR: {run_dir} {words}") or words in mistake
    assert mistake.count(". ") == 1


@pytest.mark.parametrize(
    ("owner", "us", "is_refused"),
    [(1000, 1000, False), (0, 1000, False), (0, 0, False), (1001, 1000, True), (1000, 0, True)],
)
def test_a_run_directory_of_another_user_is_refused_even_for_root(
    owner: int, us: int, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Owned(type(Path())):  # type: ignore[misc]
        def stat(self, **_: object) -> os.stat_result:
            return os.stat_result((0o40700, 0, 0, 0, owner, 0, 0, 0, 0, 0))

    monkeypatch.setattr("os.geteuid", lambda: us)

    fault = run_dir_fault(Owned("/run"))

    assert (fault is not None) is is_refused
    assert fault is None or "belongs to another user" in str(fault)


def test_the_soft_limit_of_open_files_is_raised_to_the_hard_one() -> None:
    """The test runs a separate process, because a lowered hard limit cannot be raised again."""
    soft, hard = 256, 300
    script = (
        "import resource; from dispatcher.supervisor.preflight import raise_file_limit; "
        "raise_file_limit(); print(*resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    lower = partial(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
    ended = subprocess.run([sys.executable, "-c", script], preexec_fn=lower, capture_output=True, text=True, check=True)

    assert ended.stdout.split() == [str(hard), str(hard)]
