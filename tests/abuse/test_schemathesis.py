"""Runs all checks of Schemathesis against an API process with API keys and held emails."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import psycopg
import pytest

from tests.abuse.measure import make_held
from tests.acceptance.harness import Host
from tests.api.running_api import make_key

SECONDS: Final = 180
HERE: Final = Path(__file__).parent


@pytest.mark.abuse
def test_schemathesis_finds_nothing(host: Host, connection: psycopg.Connection) -> None:
    key = make_key(connection, tenant_id="attacker", scopes=["send", "read", "operate"])
    held = make_held(connection)
    api = host.command("api", API_ADDRESS="127.0.0.1:0", LOG_FORMAT="json", PROVIDERS="")
    port = int(api.await_events("api.started")["listener"].rpartition(":")[2])

    words = ["--config-file", str(HERE / "schemathesis.toml"), "run", f"http://127.0.0.1:{port}/openapi.json"]
    options = [f"--header=Authorization: Bearer {key}", "--continue-on-failure", f"--max-time={SECONDS}"]
    environment = {**os.environ, "HELD": ",".join(held), "SCHEMATHESIS_HOOKS": "tests.abuse.schemathesis_hooks"}
    done = subprocess.run(
        [str(Path(sys.executable).parent / "schemathesis"), *words, *options],
        cwd=host.folder,
        env=environment | {"PYTHONPATH": str(HERE.parents[1])},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stdout
    actions = connection.execute("select distinct action from operator_audit").fetchall()
    assert {("confirm",), ("release",), ("replay",)} <= set(actions)
    assert not api.events("error.unexpected")
