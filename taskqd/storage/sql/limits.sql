-- name: connection_limits
-- For the budget check before a group starts. $1: what the application names of the group's own sessions begin with.
-- reserved_connections exists from Postgres 16. A role without pg_read_all_stats sees no backend_type of the
-- sessions of others: those with a user are counted. Reads shared memory; locks nothing.
select current_setting('max_connections')::int as max_connections,
       current_setting('superuser_reserved_connections')::int as superuser_reserved,
       coalesce(current_setting('reserved_connections', true)::int, 0) as reserved,
       (select count(*)::int
          from pg_catalog.pg_stat_activity
         where coalesce(backend_type = 'client backend', usesysid is not null)
           and not starts_with(coalesce(application_name, ''), $1)) as others
