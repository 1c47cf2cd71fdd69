"""The parent: forks workers, relay and monitor, reaps, restarts, drains. No thread, no socket, no database."""
