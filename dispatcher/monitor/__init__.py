"""The pages of the monitor: a process per host that serves metrics and health checks. No email passes through it.

pages             the web server with /metrics, /healthz and /readyz
health            the checks of /readyz
server_gauges     the gauges of /metrics that the monitor reads from PostgreSQL and RabbitMQ
polling           polls a server at intervals
readiness_client  reads /readyz of this host's monitor, for the command line

`processes.monitor` runs these pages with the services in `maintenance`. If PostgreSQL or RabbitMQ is unreachable, the
monitor keeps running. Workers do not depend on the monitor.
"""
