"""procrastinate: jobs in PostgreSQL itself, taken by one statement each."""
