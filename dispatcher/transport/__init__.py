"""Clients for HTTP, SMTP and TLS that report exactly whether an email was sent. Nothing here is specific to a provider.

The last two modules in this list send no email: they post alerts and events to URLs that operators and applications
have chosen.

call               the interface between a transport and the attempt that it serves
body               the request body, written in pieces
mime mime_headers  an email as a MIME message
http               a pool of TLS connections; exactly one POST per call
http_response      the three results of a call: a response, no response, or a request that was not sent
http_connection    one HTTP connection
http_proxy         opens a tunnel through the proxy that HTTPS_PROXY sets
tls                the TLS layer, and the certificates that our clients trust
smtp_pool          the SMTP connections that a worker keeps open
smtp_connection    opens an SMTP connection: TCP, TLS, EHLO, AUTH; if that fails, no email was sent
smtp_transaction   sends one email, from MAIL to the final dot, and remembers how far it got
smtp_protocol      command lines and replies; detects replies without a command
smtp_replies       the outcome for each reply
signed_post        signed posts to one URL
destination        resolves the host of a signed post, and checks that its addresses are public
"""
