"""PostgreSQL: the truth about every email; the only package that imports psycopg.

`sql/queries/` has the statements, `statements` executes them, and `connections` opens sessions. Each other module is
one subject: `migrations` (the tables), `enqueueing` and `drafts`, `leases` (lease, renew, release, record), `outbox`
(what is due), `settlement` (what a dead worker left), `timeline` (promotions), `emails` (what can be read of an email),
`failures` (failed and held emails), `counts`. `locked` and `apart` keep one email from stopping a batch.
"""
