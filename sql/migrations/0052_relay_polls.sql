-- A row means: the leading relay polls, so commits that make emails due do not notify it. Without a row, they notify it.
-- Each statement that makes emails due looks for a row once. So the table has no index, and is written rarely.
create table relay_polls (
    since timestamptz not null default clock_timestamp()
);

comment on column relay_polls.since is 'When emails began to become due so often that the relay polls.';

-- The roles that enqueue or lease emails get their rights here, as in 0024.
do $$
declare
    grantee text;
    rights text;
begin
    for grantee, rights in
        select distinct
            acl.grantee::regrole::text,
            case acl.privilege_type when 'INSERT' then 'select' else 'select, insert, delete' end
        from pg_class as c, aclexplode(c.relacl) as acl
        where c.oid = 'email_log'::regclass and acl.privilege_type in ('INSERT', 'UPDATE')
            and acl.grantee not in (0, c.relowner)
    loop
        execute format('grant %s on relay_polls to %s', rights, grantee);
    end loop;
end
$$;
