"""The leading relay publishes due rows of the whole database to RabbitMQ.

publish_loop  runs one round after another, and the leader's services between them
leadership    elects the relay that publishes: a relay that is connected to RabbitMQ, if there is any
pointers      publishes due emails to the send queue; remembers them until their due mark is cleared
dead_letters  publishes failed and held emails to the DLQ
queue_writer  publishes to one queue, with a backoff
"""
