"""Services that run at intervals. Most of them run on only one host at a time (see `store.named_locks`).

partitions           creates the partitions of the next weeks
pruning              deletes old data
recipient_summaries  repairs the index that makes look-ups by recipient fast
alert_checks         checks the DLQ, and whether emails are being sent; raises and resolves alerts
dlq_depth            reads the number of messages on the DLQ
alert_sender         sends the notices of alerts through one channel
alert_state          remembers which notices each channel has sent
message_polling      asks providers what became of messages whose events may be lost
samples              writes figures per minute and the processes of each host, for the operators' page
"""
