"""Runs an application that enqueues with the library: `python benchmarks/library_load.py --batch 500`.

The application uses one connection, and runs one transaction after the other. Each transaction has one email
(`enqueue`) or many emails (`enqueue_many`), and each commit waits for the disk. The emails are validated again for each
transaction, as in an application. DISPATCHER_DATABASE_URL must be set.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from itertools import count
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for `python benchmarks/library_load.py`

import psycopg

from benchmarks.http_load import EMAIL, load_result
from dispatcher import Email, enqueue, enqueue_many


def _run(options: argparse.Namespace) -> dict[str, float]:
    numbers = count()
    seconds: list[float] = []
    with psycopg.connect(os.environ["DISPATCHER_DATABASE_URL"]) as connection:
        began_at = time.perf_counter()
        while time.perf_counter() < began_at + options.seconds:
            call_at = time.perf_counter()
            _enqueue(connection, [f"{options.name}-{next(numbers)}" for _ in range(options.batch)])
            seconds.append(time.perf_counter() - call_at)
        return load_result(seconds, time.perf_counter() - began_at, options.batch, refused=0)


def _enqueue(connection: psycopg.Connection[Any], keys: list[str]) -> None:
    emails = [Email.from_json({"message_key": key, **EMAIL}) for key in keys]
    if len(emails) == 1:
        enqueue(connection, emails[0])
    else:
        enqueue_many(connection, emails)
    connection.commit()


def main() -> None:
    """The command line; prints one line of JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--name", default="load")
    sys.stdout.write(json.dumps(_run(parser.parse_args())) + "\n")


if __name__ == "__main__":
    main()
