"""One worker process: lease, send, decide, record, ack.

Everything runs on one asyncio loop. Work is batched by itself: while one statement is under way, the next batch gathers
(`batches`). `pipeline` is the sentence; `sending` is one email on its way; `contents` reads large
content for it; `process` is the process around it.
"""
