"""The HTTP API: stores emails durably, publishes messages for them, and reports their status. It sends no emails.

A request to enqueue an email passes through these modules, in this order:

    http_protocol.py         HTTP/1.1: timeouts, size limits, strict framing
    error_middleware.py      turns exceptions into problem responses
    app.py                   calls the enqueue endpoints directly, and routes other requests
    enqueue_endpoints.py     the endpoints for one email and for a batch
    access.py                authenticates the key, and checks its scope and rate
    body_reader.py           reads the body within limits
    dispatcher.admission     checks the email, and enqueues it

Needs the extra `api`. Only this package imports Starlette.
"""
