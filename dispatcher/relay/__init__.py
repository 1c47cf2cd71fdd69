"""The relay that leads publishes for the whole database: what is due goes to RabbitMQ.

publishing    its loop: one look after the other, and the leader's services between them
leadership    which relay leads: one that reaches RabbitMQ, if there is one
pointers      due emails → send queue; what it knows of its messages until a lease or a mark takes off the due mark
dead_letters  failed and held emails → DLQ
queue_writer  the way to one queue
"""
