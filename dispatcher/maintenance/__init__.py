"""Maintenance: what keeps the tables and their operators in order, on one host at a time (`store.turns`).

partitions  makes the partitions of the next weeks
pruning     forgets what is old
dlq_alert   looks at the DLQ (dlq_depth) and at the flow of emails; announcing tells each channel of alerts what stands,
            and alert_book remembers what it told
"""
