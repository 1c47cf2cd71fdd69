"""procrastinate: jobs in PostgreSQL, fetched by one statement each."""
