"""The relay process and the monitor process: what each process opens, runs, and closes.

relay    while it is the leader, publishes due emails; recovers the emails of this host's workers
monitor  serves status pages, sends alerts and webhooks, and deletes old data
"""
