"""Recovery: every email whose owner or message is lost is sent later, held or failed. One guarantee per file.

dead_worker    a worker died: settles its in-flight ledger                            } each relay, for the ledgers
frozen_worker  a worker is frozen past its leases: settles them by its ledger         } of its own host
ledgers        finds these ledgers; `settlement` holds what both share
lost_host      a host and its ledgers are lost: judges expired leases by policy       } the leading relay,
lost_message   RabbitMQ lost a message: makes its email due again                     } for the whole database
lost_commits   a promoted standby lacks commits: marks the emails that are in doubt   }
unrenewed      decides which leases have expired by a steady clock, too
"""
