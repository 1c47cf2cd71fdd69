"""Our processes raise their limit of open files to the highest value that the system allows."""

from __future__ import annotations

import resource
import subprocess
import sys


def test_the_soft_limit_of_open_files_is_raised_to_the_hard_one() -> None:
    """The test runs a separate process, because a lowered hard limit cannot be raised again."""
    soft, hard = 256, 300
    script = (
        "import resource; from dispatcher.supervisor.preflight import raise_file_limit; "
        "raise_file_limit(); print(*resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard)),
        capture_output=True,
        text=True,
        check=True,
    )

    assert ended.stdout.split() == [str(hard), str(hard)]
