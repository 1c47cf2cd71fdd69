"""Code that the processes of a host share: the in-flight ledger, the process table, the monotonic clock, stop signals,
the web server for status pages, batch queues, the runner of periodic services, and look-ups of host names.
"""
