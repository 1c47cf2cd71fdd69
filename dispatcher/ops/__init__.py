"""Operator actions, used by the command line and the HTTP API.

All functions are asynchronous and take an open PostgreSQL session in autocommit mode (from `connect_async` in
`store.connections`, or from `session` there for a session of a pool). Functions that remove dead letters from the DLQ
also take a `broker.dlq.DeadLetterQueue` on an open connection (`broker.connection.open_connection`). Every change of an
email's row is audited with actor and reason, and idempotent.

    act = Act.of("ann@ops-1", "the provider shows it")             acts: actor and reason; the reason is required

    verdicts      confirm(session, email_id, act) -> Verdict       held → sent
                  release(session, email_id, act) -> Verdict       held → pending and due
    replaying     preview(session, selection, …) -> Preview        dry run: counts and samples; changes nothing
                  overlaps(session, selection) -> [OverlappingReplay]
                                                                   running replays with some of the same emails
                  create(session, selection, act, …) -> Replay     stores the list of emails; changes no email
                  find(session, replay_id) -> Replay | None        state, counts by outcome, rate, actor, reason
                  stop(session, replay_id, act) -> Replay | None   ends the replay; replayed emails are still sent
                  resume(session, replay_id, actor=…)              lets the next `run` (below) continue the replay
                  run(session, dlq, replay_id, …) -> Ended         replays at the replay's rate until done or stopped
    dead_letters  sweep(session, dlq, email_ids=None) -> int       removes stale dead letters from the DLQ
                  discard(session, email_ids, act) -> set          makes dead letters stale; does not change the emails
    poison        list_poison, discard_poison, repair_poison       DLQ messages that belong to no email
    reconcile     reconcile(session, dlq, act=None)                compares DLQ and database; with act, repairs the DLQ
    email_history find_history(session, email_id, …) -> EmailHistory | None
                                                                   everything that the database has about one email
    messages      find_messages(session, dlq, email_id) -> list    the email's messages on the DLQ

A `store.failures.Selection` selects emails by ids or by a filter. `run` replays in the calling process. One process at
a time runs a given replay, on a session that the process uses for nothing else. If that process dies, the replay stays
`running` with `is_active` false. Nothing is lost: call `run` again to continue. If RabbitMQ is unreachable, stale dead
letters stay on the DLQ. They do no harm, and the next sweep removes them. Only one session at a time reads the DLQ;
other sessions wait up to ten seconds.
"""
