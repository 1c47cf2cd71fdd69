-- As migration 0053, for the tables that are small.
alter table lane_policy alter column lane type text collate "C";
alter table lane_rule alter column sender type text collate "C";
alter table tenant_limit alter column tenant_id type text collate "C";
alter table pause alter column scope type text collate "C", alter column name type text collate "C";
alter table domain_limit alter column domain type text collate "C";
alter table domain_line
    alter column domain type text collate "C",
    alter column lane type text collate "C",
    alter column tenant_id type text collate "C";
alter table api_key alter column key_id type text collate "C";
alter table api_key_day alter column key_id type text collate "C";
alter table provider_rate alter column provider type text collate "C";
alter table provider_state alter column provider type text collate "C", alter column slot type text collate "C";
alter table host_presence alter column holder type text collate "C";
alter table alert_watch alter column queue type text collate "C";
alter table alert_told
    alter column queue type text collate "C",
    alter column kind type text collate "C",
    alter column channel type text collate "C";
alter table alert_check alter column queue type text collate "C";
