"""RabbitMQ: topology, messages, confirmed publishing, consuming. The only package that imports pika.

    pointer, dead_letter   what a message's bytes mean
    outgoing               a message on its way to a queue
    confirmed              the messages that arrived there, until their emails are due no more
    connection             one connection, its channels awaitable, its faults translated; everything below uses it
    pika_connection        what pika's own connection lacks
    topology               exchange and queues: declared by `init`, verified by `run`, counted by `status`
    publisher, consumer    the two directions, each on a connection of its own: an alarm that blocks publishers must not
                           stop acks
    management             RabbitMQ's HTTP API
    inspection             what it reports of exchange and queues, judged
    users                  the least that each kind of RabbitMQ user needs

Nothing here knows the store or a provider.
"""
