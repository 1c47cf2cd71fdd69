"""Access to PostgreSQL, the source of truth for every email. Only this package imports psycopg.

`sql/queries/` contains the statements, `statements` executes them, and `connections` opens sessions. Each other module
covers one subject: `migrations` (the tables), `enqueueing` and `drafts`, `leases` (lease, renew, release, record),
`outbox` (due rows), `settlement` (leases of dead and frozen workers), `timeline` (promotions of a standby), `emails`
(reading one email), `failures` (failed and held emails), `counts` (emails by status). `locked` and `instants` keep one
bad email from blocking its batch.
"""
