"""Everything about RabbitMQ: topology, messages, publishing with confirms, consuming. The only package that imports
pika.

    pointer, dead_letter   encode and decode message bodies
    outgoing               a message to publish, as AMQP frames
    deliveries             decodes deliveries and encodes acks, faster than pika
    confirmed              confirmed messages whose emails still have a due mark
    connection             one connection and its channels, with awaitable calls
    pika_connection        extensions of pika's own connection
    faults                 translates pika's exceptions
    topology               exchange and queues: declared by `init`, verified by `run`, counted by `status`; and the
                           minimal permissions of each RabbitMQ user
    publisher, consumer    publish and consume, on separate connections: an alarm that blocks publishers must not stop
                           acks
    credit                 how many more emails may be published to a queue
    dlq                    reads the DLQ, and removes selected messages
    management             client for RabbitMQ's HTTP API
    inspection             checks what the HTTP API reports about exchange and queues

This package does not import the store or a provider.
"""
