"""The services of the monitor: a process per host. No email passes through it, and workers do not depend on it.

pages             the web server with /metrics, /healthz and /readyz
health            the checks of /readyz
server_gauges     the gauges of /metrics that the monitor reads from PostgreSQL and RabbitMQ
polling           polls a server at intervals
alert_checks      checks the DLQ, and whether emails are being sent; raises and resolves alerts
alert_state       remembers which notices each channel has sent
alert_sender      sends the notices of alerts through one channel
alert_channels    the log and the webhook; creates the channels that the settings configure
alert_mail        email through an SMTP server that is configured only for alerts
alert_words       the texts and the JSON of a notice
dlq_depth         reads the number of messages on the DLQ
message_polling   asks providers what became of messages whose events may be lost
samples           writes figures per minute and the processes of each host, for the operators' page
upkeep            creates partitions, deletes old data, and keeps look-ups by recipient fast

`supervisor.monitor_process` runs them; most run on only one host at a time (see `store.named_locks`). If PostgreSQL or
RabbitMQ is unreachable, the monitor keeps running.
"""
