"""Enqueues a peer's emails as an application would: `python -m benchmarks.peers.enqueue MODULE --emails N`.

Several threads represent an application's requests; each thread commits one email at a time. Prints one line of JSON.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import threading
import time

import psycopg

from benchmarks.peers import application
from benchmarks.peers.application import Draft

THREADS = 8


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("module")
    parser.add_argument("--emails", type=int, required=True)
    options = parser.parse_args()
    enqueue = importlib.import_module(options.module).enqueue
    waiting = application.drafts(options.emails)
    lock = threading.Lock()
    failures: list[Exception] = []

    def take() -> Draft | None:
        with lock:
            return next(waiting, None)

    def work() -> None:
        try:
            with psycopg.connect(application.settings().database_url, autocommit=True) as connection:
                for draft in iter(take, None):
                    enqueue(connection, draft)
        except Exception as error:  # noqa: BLE001 - the main thread raises it
            failures.append(error)

    began_at = time.perf_counter()
    threads = [threading.Thread(target=work) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    sys.stdout.write(json.dumps({"seconds": time.perf_counter() - began_at}) + "\n")


if __name__ == "__main__":
    main()
