"""The relay process and the monitor process: what each process opens, runs, and closes.

relay    publishes for the database while it leads; recovers the emails of this host's workers
monitor  serves status pages, sends alerts, and deletes old data
"""
