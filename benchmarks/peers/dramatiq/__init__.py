"""dramatiq: an actor per email over RabbitMQ, acknowledged when the actor is done."""
