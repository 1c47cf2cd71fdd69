"""Private PostgreSQL and RabbitMQ for development, the demo, tests and benchmarks, without root and without Docker.

Begin reading with `servers`, which has `start`, `stop`, `status` and the context manager `private_servers`. `postgres`
and `rabbitmq` each find, prepare and start one server. `cache` and `debian` download programs that are not installed.
`processes` controls the `keeper`, a small process that is the parent of every server. If the servers have an owner (the
process that started them, such as a test run), the keeper stops them when the owner exits.
"""
