"""The parent process: forks workers, relay and monitor, restarts them, and drains. It uses no threads, no sockets and
no database.

`relay_process` and `monitor_process` contain what these processes open, run and close.
"""
