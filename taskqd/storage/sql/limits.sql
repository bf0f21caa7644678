-- Statements of the connection budget: what the server grants, and who holds it.

-- name: connection_ceilings
-- What the server, our role and our database allow. reserved_connections exists from Postgres 16. A superuser is held to
-- no limit of its own. Reads two small catalogs; locks nothing.
select 'server' as of, null as limited_by,
    current_setting('max_connections')::int as max_connections,
    current_setting('superuser_reserved_connections')::int as superuser_reserved,
    coalesce(current_setting('reserved_connections', true)::int, 0) as reserved
union all
select 'role', 'role ' || r.rolname, r.rolconnlimit, 0, 0
from pg_catalog.pg_roles r
where r.rolname = session_user and not r.rolsuper and r.rolconnlimit >= 0
union all
select 'database', 'database ' || d.datname, d.datconnlimit, 0, 0
from pg_catalog.pg_database d join pg_catalog.pg_roles r on r.rolname = session_user
where d.datname = current_database() and not r.rolsuper and d.datconnlimit >= 0

-- name: live_sessions
-- Every session of a client but this one, counted by name. A role without pg_read_all_stats sees no backend_type of the
-- sessions of others: those with a user are counted. Reads shared memory; locks nothing.
select coalesce(application_name, '') as name,
    usesysid is not distinct from (select oid from pg_catalog.pg_roles where rolname = session_user) as own_role,
    datid is not distinct from (select oid from pg_catalog.pg_database where datname = current_database())
        as own_database,
    count(*)::int as sessions
from pg_catalog.pg_stat_activity
where coalesce(backend_type = 'client backend', usesysid is not null) and pid <> pg_catalog.pg_backend_pid()
group by 1, 2, 3

-- name: lock_groups
-- Taken by whoever is about to declare connections, before it looks: two that begin together look one after the other.
-- Held to the end of the transaction.
select pg_catalog.pg_advisory_xact_lock(pg_catalog.hashtextextended('taskq:groups:' || {schema_literal}, 0))

-- name: groups_exist
-- Whether there is a table of groups to look at.
select pg_catalog.to_regclass(pg_catalog.quote_ident({schema_literal}) || '.groups') is not null

-- name: declared_groups
-- What the living groups have declared. A handful of rows.
select name, place, connections, db_role = session_user as own_role
from {schema}.groups
where expires_at > clock_timestamp()
order by name, place

-- name: declare_group
-- $1 group, $2 place, $3 connections, $4 seconds until it expires. Replaces the row of a predecessor. Primary key.
insert into {schema}.groups (name, place, db_role, connections, expires_at)
values ($1::text, $2::text, session_user, $3::int, clock_timestamp() + make_interval(secs => $4::float8))
on conflict (name, place) do update set
    db_role = excluded.db_role, connections = excluded.connections,
    declared_at = clock_timestamp(), expires_at = excluded.expires_at

-- name: forget_groups
-- Rows of groups that ended a day ago or longer without taking them away. A handful of rows.
delete from {schema}.groups where expires_at < clock_timestamp() - interval '1 day'

-- name: renew_group
-- $1 group, $2 place, $3 seconds until it expires, $4 seconds that make a renewal worth while: every process of a group
-- asks, one of them writes. Primary key; HOT.
update {schema}.groups set expires_at = clock_timestamp() + make_interval(secs => $3::float8)
where name = $1::text and place = $2::text
  and expires_at < clock_timestamp() + make_interval(secs => $3::float8 - $4::float8)

-- name: withdraw_group
-- $1 group, $2 place. The group ends on purpose; what its processes still hold counts as live. Primary key.
delete from {schema}.groups where name = $1::text and place = $2::text
