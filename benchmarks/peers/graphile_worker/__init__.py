"""graphile-worker: jobs in PostgreSQL, and workers on Node.js, which fetch and complete jobs in batches."""
