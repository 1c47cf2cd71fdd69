"""Shared by the processes of one host.

The in-flight ledger, the process table, the steady clock, stop signals, the web server for status pages, batch queues,
and the runner of periodic services.
"""
