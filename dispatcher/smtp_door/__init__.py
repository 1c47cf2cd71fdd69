"""The SMTP server: accepts emails from clients that log in with an API key. It relays nothing else.

An email passes through these modules, in this order:

    server.py       opens the listener and the database, drains on SIGTERM
    guard.py        limits connections and failed logins per address
    connection.py   one client: TLS, login, commands; aiosmtpd reads the commands
    content.py      collects the content after DATA within limits
    door.py         checks and enqueues the email (`dispatcher.admission`), and words each refusal (replies.py)
    message_key.py  which email a repeated message is, and which of its recipients are new

Needs the extra `smtp`. docs/smtp.md is the guide for users.
"""
