-- name: try_turn
-- True: what this name stands for is this session's to do until end_turn, or until the session ends.
select pg_try_advisory_lock(hashtext('email_dispatcher_turn'), hashtext(%(name)s));

-- name: end_turn
-- Gives the turn to whoever comes next.
select pg_advisory_unlock(hashtext('email_dispatcher_turn'), hashtext(%(name)s));
