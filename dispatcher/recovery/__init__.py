"""Recovery: if a worker dies with leased emails, or RabbitMQ loses a message, the emails are sent later, held or
failed.

To settle a worker's ledger means: to record every result that it contains, and to release all other leases of the
worker.

dead_worker    a worker died: settles its in-flight ledger                            } each relay, for the ledgers
frozen_worker  a worker is frozen, and its leases have expired: settles these leases  } of its own host
ledgers        finds these ledgers; `settlement` contains the common code
lost_host      a host and its ledgers are lost: holds or resends its emails           } the leading relay,
lost_message   RabbitMQ lost a message: makes its email due again                     } for the whole database
lost_commits   a promoted standby lacks commits: marks the emails that are uncertain  }
unrenewed      checks by the monotonic clock, too, that a lease has expired
"""
