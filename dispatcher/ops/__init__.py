"""What operators do, for whoever offers it to them: the command line and the HTTP API.

Everything is asynchronous and takes an open session of PostgreSQL in autocommit (`store.connections`: `connect_async`,
or one of a pool by `session`); where dead letters leave the DLQ, also a `broker.dlq.DeadLetterQueue` over an open
connection (`broker.connection.open_connection`). Every change is one commit per email, on record with who and why, and
harmless to repeat.

    act = Act.of("ann@ops-1", "the provider shows it")          acts: who and why; an empty reason is refused

    verdicts   confirm(session, email_id, act) -> Verdict       held → sent
               release(session, email_id, act) -> Verdict       held → pending and due
    replaying  preview(session, selection, …) -> Preview        the dry run: counts and a sample; changes nothing
               meetings(session, selection) -> [Meeting]        running replays that have some of the same emails
               create(session, selection, act, …) -> Replay     settles which emails; changes none of them
               find(session, replay_id) -> Replay | None        state, counts by outcome, pace, who and why
               stop(session, replay_id, act) -> Replay | None   no further email; what was replayed stays so
               resume(session, replay_id, actor=…)              lets it go on, by the next run
               run(session, dlq, replay_id, …) -> Ended         goes on until done or stopped, at its pace
    letters    sweep(session, dlq, email_ids=None) -> int       stale dead letters leave the DLQ
               discard(session, email_ids, act) -> set          makes letters stale, and leaves the emails as they are
    poison     list_poison, discard_poison, repair_poison       messages behind which no email stands
    reconcile  reconcile(session, dlq, act=None)                the DLQ against the database; mends if it is an act
    stories    tell(session, email_id, …) -> Story | None       all that the database knows of one email
    messages   find_messages(session, dlq, email_id) -> list     what the DLQ holds of it

A `store.failures.Selection` names emails by ids or by a filter. A replay is run by whoever calls `run`, one at a time,
on a session that is his alone meanwhile; one whose runner died is `running` with nobody at it (`is_active`), loses
nothing, and goes on when `run` is called again. A dead letter that is not swept, because RabbitMQ is away, does no
harm: it is stale, and the next sweep takes it. Who looks into the DLQ waits for his turn, ten seconds at most.
"""
