"""The relay: what is due goes to RabbitMQ, what lost its owner is returned.

publishing   the database's one publisher of rows that are due (an advisory lock elects it; the others stand by):
             outbox → send queue, failed and held → DLQ, expired leases → rescue, partitions made ahead
leadership   which relay that is: one that reaches RabbitMQ, if there is one
pointers     what publishing knows of its messages, until a lease or a mark has taken off the due mark
settlement   every relay, for the run directory of its host: dead workers' in-flight ledgers
expired      the same for workers that are frozen past their leases
unrenewed    which leases have run out by a steady clock, too; for publishing and expired
process      the process around both
"""
