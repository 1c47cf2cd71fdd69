"""What operators do by rules of its own: replays, poison messages, comparisons, histories. The rest is in `actions`.

All functions are asynchronous and take an open PostgreSQL session in autocommit mode (from `connect_async` in
`store.connections`, or from `session` there for a session of a pool). Functions that read or change the DLQ also take a
`broker.dlq.DeadLetterQueue` on an open connection. Every change is audited with actor and reason, and idempotent.

    act = Act.of("ann@ops-1", "the provider shows it")             acts: actor and reason; the reason is required

    replaying     preview(session, selection, …) -> Preview        dry run: counts and samples; changes nothing
                  overlaps(session, selection) -> [OverlappingReplay]
                                                                   running replays with some of the same emails
                  create(session, selection, act, …) -> Replay     stores the list of emails; a single one is replayed
                  run(session, replay_id, …) -> Ended              replays at the replay's rate until done or stopped
    poison        list_poison, discard_poison, repair_poison       DLQ messages that belong to no email
    reconcile     reconcile(session, dlq, act=None)                compares DLQ and database; with act, repairs the DLQ
    email_history find_history(session, email_id, …) -> EmailHistory | None
                                                                   everything that the database has about one email
                  find_messages(session, dlq, email_id) -> list    the email's messages on the DLQ

A `domain.failures.Selection` selects emails by ids or by a filter. `run` replays in the calling process. One process at
a time runs a given replay, on a session that the process uses for nothing else. If that process dies, the replay is
`interrupted`, and nothing is lost: call `run` again to continue. `actions.dlq` stops and resumes replays. Dead letters
of replayed, confirmed, released and discarded emails are stale. They do no harm, and a monitor removes them
(`monitor.dead_letters`). Only one session at a time reads the DLQ; other sessions wait up to ten seconds.
"""
