"""Ways to reach a person when something is wrong; none of them uses this dispatcher's queues, tables or providers.

contract    what a channel is
wording     a notice in words, and as JSON
webhook     POST over https, signed as Standard Webhooks says, to addresses that were looked at first
destination which addresses a webhook may go to
mail        email through an SMTP server of its own
channels    our own log, and the channels that the settings name
"""
