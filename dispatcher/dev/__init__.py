"""Private PostgreSQL and RabbitMQ for development, the demo, tests and benchmarks: no root, no docker, no trace.

`servers` is the way in: start, stop, status, and `private_servers` for whoever wants a set that dies with its owner.
`postgres` and `rabbitmq` know how to find, prepare and await one server each; `cache` and `debian` fetch what is not
installed; `processes` speaks to the `keeper`, a small process that is the parent of every server and outlives nobody.
"""
