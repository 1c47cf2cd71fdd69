"""PostgreSQL: the truth about every email; the only package that imports psycopg.

Each module is one subject: `migrations` (the tables), `enqueueing`, `leases` (lease, renew, release, record), `outbox`
(what is due, and rescue), `settlement` (what a dead worker left), `timeline` (promotions), `counts`. `locked` and
`apart` keep one email from stopping a batch. Statements stand in `sql/queries/`.
"""
