"""How an email leaves this process, over HTTP and SMTP, and the truth about how that ended; of no provider's own.

call               what a transport asks of the attempt that it carries out
body               what goes on the wire, in pieces
mime mime_headers  an email as MIME
http               kept TLS connections, exactly one POST per call
http_answer        how a call ended
http_connection    one of them
http_proxy         a tunnel through the environment's proxy
tls                TLS below a protocol; whom our clients trust
smtp_pool          the SMTP connections that a worker keeps
smtp_connection    TCP, TLS, EHLO, AUTH              every failure definite, or a ProviderFault
smtp_transaction   MAIL … final dot on one of them   knows the phase
smtp_conversation  lines and replies                 knows what has left, and when a server is out of step
smtp_replies       what each reply means
"""
