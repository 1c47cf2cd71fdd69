"""procrastinate: jobs in PostgreSQL; a worker fetches each job by one statement."""
