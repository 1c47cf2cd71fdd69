"""One worker process: lease, send, record.

Everything runs on one asyncio loop. `pipeline` connects the stages, each with an inbox (`host.batch_queue`).
`in_flight_email` is the unit of work that passes through them. `process` opens and closes the connections.
"""
