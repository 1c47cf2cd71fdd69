"""Celery: one task per email over RabbitMQ, acknowledged after the task is done."""
