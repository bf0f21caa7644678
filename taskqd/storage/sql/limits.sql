-- name: connection_limits
-- For the budget check before a group starts: the tightest of what the server, our role and our database allow. $1: what
-- the application names of the group's own sessions begin with. reserved_connections exists from Postgres 16. A role
-- without pg_read_all_stats sees no backend_type of the sessions of others: those with a user are counted. A superuser
-- is held to no limit of its own. Reads shared memory and two small catalogs; locks nothing.
with sessions as (
    select usesysid, datid
    from pg_catalog.pg_stat_activity
    where coalesce(backend_type = 'client backend', usesysid is not null)
      and not starts_with(coalesce(application_name, ''), $1)
), ceilings as (
    select null as limited_by,
        current_setting('max_connections')::int as max_connections,
        current_setting('superuser_reserved_connections')::int as superuser_reserved,
        coalesce(current_setting('reserved_connections', true)::int, 0) as reserved,
        (select count(*)::int from sessions) as others
    union all
    select 'role ' || r.rolname, r.rolconnlimit, 0, 0,
        (select count(*)::int from sessions s where s.usesysid = r.oid)
    from pg_catalog.pg_roles r
    where r.rolname = session_user and not r.rolsuper and r.rolconnlimit >= 0
    union all
    select 'database ' || d.datname, d.datconnlimit, 0, 0,
        (select count(*)::int from sessions s where s.datid = d.oid)
    from pg_catalog.pg_database d join pg_catalog.pg_roles r on r.rolname = session_user
    where d.datname = current_database() and not r.rolsuper and d.datconnlimit >= 0
)
select limited_by, max_connections, superuser_reserved, reserved, others
from ceilings
order by max_connections - superuser_reserved - reserved - others
limit 1
