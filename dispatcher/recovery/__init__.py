"""Recovery: every email whose owner or message is lost is sent later, held or failed. One promise per file.

dead_worker    a worker process died: its in-flight ledger says what had left         } each relay, for the run
frozen_worker  a worker process is frozen past its leases: its ledger says so, too    } directory of its own host
ledgers        finds those ledgers; settlement is what both write
lost_host      a host and its ledgers are gone: expired leases are judged by policy   } the leading relay,
lost_message   RabbitMQ lost a message: its email is due again                        } for the whole database
lost_commits   a promoted standby lacks commits: what they may have sent is in doubt  }
unrenewed      which leases have expired by a steady clock, too
"""
