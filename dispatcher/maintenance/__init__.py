"""Maintenance: what keeps the tables and their operators in order, on one host at a time (`store.turns`).

partitions  makes the partitions of the next weeks
pruning     forgets what is old
"""
