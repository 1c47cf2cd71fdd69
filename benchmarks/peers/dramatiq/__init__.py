"""dramatiq: one actor per email over RabbitMQ, acknowledged after the actor is done."""
