-- `dispatcher status` and `dispatcher show` read the pauses: the roles that may read providers' states may read them, too.
do $$
declare
    grantee text;
begin
    for grantee in
        select distinct acl.grantee::regrole::text
        from pg_class as c, aclexplode(c.relacl) as acl
        where c.oid = 'provider_state'::regclass
            and acl.privilege_type = 'SELECT'
            and acl.grantee not in (0, c.relowner)
    loop
        execute format('grant select on pause to %s', grantee);
    end loop;
end
$$;
