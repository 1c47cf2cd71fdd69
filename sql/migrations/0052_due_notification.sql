-- Whether commits that make emails due notify the relay. False: emails become due so often that the relay polls. The
-- table has one row. Each statement that makes emails due reads it once, so it must stay small: nothing writes it often.
create table due_notification (
    is_only boolean not null default true,
    is_on boolean not null default true,
    constraint due_notification_pkey primary key (is_only),
    constraint due_notification_is_only check (is_only)
);

insert into due_notification default values;

-- The roles that enqueue or lease emails get their rights here, as in 0024.
do $$
declare
    grantee text;
    rights text;
begin
    for grantee, rights in
        select distinct acl.grantee::regrole::text, case acl.privilege_type when 'INSERT' then 'select' else 'update' end
        from pg_class as c, aclexplode(c.relacl) as acl
        where c.oid = 'email_log'::regclass and acl.privilege_type in ('INSERT', 'UPDATE')
            and acl.grantee not in (0, c.relowner)
    loop
        execute format('grant %s on due_notification to %s', rights, grantee);
    end loop;
end
$$;
