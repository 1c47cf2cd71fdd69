"""One worker process: lease, send, record.

Everything runs on one asyncio loop. `line` is the sentence: three stages, each with an inbox and an outbox
(`host.batches`). `in_flight_email` is what passes through them; `process` is the process around them.
"""
