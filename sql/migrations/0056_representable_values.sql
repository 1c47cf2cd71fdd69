-- The schema refuses values that Python or AMQP cannot represent, because a producer may insert any value. See
-- docs/decisions/0065-values-that-python-cannot-represent.md.
--
-- Domains cost less than checks of the table: PostgreSQL parses each check of a table at each statement that writes to
-- the table, but keeps the constraints of a domain. A column adopts a domain without a constraint, so PostgreSQL
-- rewrites no row and rebuilds no index. A constraint that is `not valid` then applies only to new values, so damaged
-- rows stay readable. A column that is in an index with a predicate cannot adopt a domain without rebuilding that index.
create domain email_instant as timestamptz;
create domain email_traceparent as text;
create domain email_on_uncertain as text;

-- Both constraints of the table are replaced: the first one by a domain, the second one by a stricter one.
alter table email_log
    drop constraint email_log_on_uncertain_known,
    drop constraint email_log_waits;
alter table email_log
    alter column locked_until type email_instant,
    alter column due_since type email_instant,
    alter column traceparent type email_traceparent,
    alter column on_uncertain type email_on_uncertain,
    add constraint email_log_waits check ((status = 'waiting') = (isfinite(wait_until) is true)) not valid;

alter domain email_instant add constraint email_instant_representable
    check (value >= '1970-01-01 00:00+00' and value < '10000-01-01 00:00+00') not valid;
alter domain email_traceparent add constraint email_traceparent_form check (char_length(value) = 55) not valid;
alter domain email_on_uncertain add constraint email_on_uncertain_known check (value in ('hold', 'resend')) not valid;

comment on domain email_instant is 'An instant in the years 1970 to 9999. Python knows no instant after them.';
comment on domain email_traceparent is 'A W3C traceparent. It becomes a header of a message.';
