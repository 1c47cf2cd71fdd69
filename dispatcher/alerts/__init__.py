"""Channels that notify operators.

No channel uses this dispatcher's queues, tables or providers, so operators are notified even if these fail.

contract    the protocol of a channel
wording     the texts and the JSON of a notice
webhook     POST over https, signed according to Standard Webhooks (transport.signed_post)
mail        email through an SMTP server that is configured only for alerts
channels    the log as a channel; creates the channels that the settings configure
"""
