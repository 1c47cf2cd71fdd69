"""What the processes of one host share.

The in-flight ledger, the process table, the monotonic clock, stop signals, the web server for status pages, batch
queues, and the runner of periodic services.
"""
