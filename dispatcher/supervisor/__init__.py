"""The parent: forks the workers and the relay, reaps, restarts, drains. No thread, no socket, no database."""
