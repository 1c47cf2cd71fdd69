"""Celery: a task per email over RabbitMQ, acknowledged late."""
