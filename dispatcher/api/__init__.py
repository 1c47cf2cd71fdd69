"""The HTTP API: makes an email durable, announces it to RabbitMQ, and answers. It never sends.

A request passes, in this order:

    protocol.py     HTTP/1.1 itself: how long a client may take, how large a head may be
    guard.py        a fault is answered with a problem
    direct.py       straight to where emails are taken
    app.py          else which path and method it is
    access.py       who asks, and whether that key may
    bodies.py       the body: its type, its size, its JSON; shares.py bounds what one caller holds at once
    intake.py       the email: the domain's rules, then what this API allows (policy.py) and this key (access.py)
    gathering.py    one statement for the emails of all requests of these milliseconds
    announcing.py   and their messages, confirmed by RabbitMQ; the relay does what is left undone

Needs the extra `api`; nothing outside this package imports FastAPI.
"""
