"""The command line of a storm refuses options that it cannot follow, before anything starts."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from tests.chaos.main import command


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--set", "REDELIVER_FOR=1m"], "--set REDELIVER_FOR=1m: write DISPATCHER_NAME=VALUE"),
        (["--set", "DISPATCHER_REDELIVER_FOR"], "write DISPATCHER_NAME=VALUE"),
        (["--set", "DISPATCHER_DATABASE_URL=postgresql://db/prod"], "the storm itself chooses DISPATCHER_DATABASE_URL"),
        (["--set", "DISPATCHER_SMTP_URL=smtp://mail.example.com"], "the storm itself chooses DISPATCHER_SMTP_URL"),
        (["--domain", "example.org:concurrent=6"], "need --provider smtp"),
        (["--recipients-per-transaction", "2"], "need --provider smtp"),
        (["--provider", "smtp", "--domain", "example.org"], "write DOMAIN:concurrent=N,per-second=N"),
        (["--provider", "smtp", "--domain", "example.org:slots=6"], "write DOMAIN:concurrent=N,per-second=N"),
        (["--provider", "smtp", "--recipients-per-transaction", "0"], "0 is not in the range"),
    ],
)
def test_an_option_that_cannot_be_followed_is_refused_with_the_reason(words: list[str], reason: str) -> None:
    result = CliRunner().invoke(command, words)

    assert result.exit_code == 2
    assert reason in " ".join(result.output.split())
