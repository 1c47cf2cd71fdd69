"""dramatiq: an actor per email over RabbitMQ, which it acknowledges when the actor is done."""
