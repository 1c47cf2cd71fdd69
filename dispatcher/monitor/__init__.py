"""The monitor: a host's third kind of process. It watches and tells; no email passes through it.

tasks     what it does: each task is an object with `async def run(self)`; one line in `tasks_of` adds one
keeping   tasks that run side by side: one that fails is logged and begun again, and never ends the others
process   the process around them

PostgreSQL and RabbitMQ may be away for as long as they like, and so may the monitor itself: sending waits for neither.
"""
