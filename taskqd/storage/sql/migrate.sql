-- Statements of the migration runner. Catalog names are qualified: a migration runs with an empty search path.

-- name: schema_exists
-- Whether the schema is there, asked of the catalog: it needs no privilege, and neither does the answer "no".
select exists (select from pg_catalog.pg_namespace where nspname = {schema_literal})

-- name: create_schema
-- Sent only when the schema is missing: `if not exists` would need the privilege even where it exists.
create schema {schema}

-- name: ledger_exists
-- Whether the ledger table is there.
select exists (
    select from pg_catalog.pg_class c
    join pg_catalog.pg_namespace n on n.oid = c.relnamespace
    where n.nspname = {schema_literal} and c.relname = 'schema_migrations'
)

-- name: create_ledger
-- One row per applied file; append-only.
create table {schema}.schema_migrations (
    version int not null check (version > 0),
    phase text not null check (phase in ('pre', 'post')),
    name text not null,
    checksum text not null,
    min_code int not null check (min_code > 0),
    applied_at timestamptz not null default clock_timestamp(),
    applied_by text not null,
    primary key (version, phase)
)

-- name: read_ledger
-- The whole ledger in the order in which files are applied. Reads a table of a few rows.
select version, phase, name, checksum, min_code, applied_at, applied_by
from {schema}.schema_migrations
order by version, phase = 'post'

-- name: record
-- $1 version, $2 phase, $3 name, $4 checksum, $5 min_code. In the transaction of the file it records.
insert into {schema}.schema_migrations (version, phase, name, checksum, min_code, applied_by)
values ($1::int, $2::text, $3::text, $4::text, $5::int, session_user)

-- name: set_bounds
-- $1 lock_timeout in milliseconds as text, $2 statement_timeout, $3 search_path, $4 true for this transaction only.
-- A long rewrite is work, not a wait, so no statement_timeout of the role may cut it. The search path is empty so that
-- a name that a file forgot to qualify is an error and not a table in another schema.
select pg_catalog.set_config('lock_timeout', $1::text, $4::bool),
       pg_catalog.set_config('statement_timeout', $2::text, $4::bool),
       pg_catalog.set_config('search_path', $3::text, $4::bool)

-- name: show_bounds
-- The session's values of what set_bounds sets, so that they can be put back.
select pg_catalog.current_setting('lock_timeout') as lock_timeout,
       pg_catalog.current_setting('statement_timeout') as statement_timeout,
       pg_catalog.current_setting('search_path') as search_path

-- name: try_lock
-- The migration lock of this schema, held by the session. Taken before every other lock.
select pg_catalog.pg_try_advisory_lock(pg_catalog.hashtextextended('taskq:migrate:' || {schema_literal}, 0))

-- name: unlock
-- Gives try_lock back.
select pg_catalog.pg_advisory_unlock(pg_catalog.hashtextextended('taskq:migrate:' || {schema_literal}, 0))

-- name: lock_holders
-- Who holds the migration lock. Ages in seconds; no query text, which may hold secrets.
select a.pid, a.application_name, a.backend_type, a.state,
       extract(epoch from clock_timestamp() - a.query_start)::float8 as query_age
from pg_catalog.pg_locks l
join pg_catalog.pg_stat_activity a using (pid)
where l.locktype = 'advisory' and l.objsubid = 1 and l.granted
  and l.database = (select oid from pg_catalog.pg_database where datname = pg_catalog.current_database())
  and (l.classid::bigint << 32 | l.objid::bigint) = pg_catalog.hashtextextended('taskq:migrate:' || {schema_literal}, 0)

-- name: blockers
-- $1 seconds that the wait lasted. Who made a DDL statement wait, asked just after it gave up: a statement that waits
-- makes later ones queue behind it, so its blockers are the transactions older than the wait that still hold a lock on
-- a relation of the schema. Failing any, the transactions of the database older than the wait: a concurrent index build
-- waits for their snapshots. A session of another role shows no times without pg_read_all_stats, and is kept.
with candidates as (
    select a.pid, a.application_name, a.backend_type, a.state,
           extract(epoch from clock_timestamp() - a.query_start)::float8 as query_age,
           a.xact_start,
           exists (
               select from pg_catalog.pg_locks l
               join pg_catalog.pg_class c on c.oid = l.relation
               join pg_catalog.pg_namespace n on n.oid = c.relnamespace
               where l.pid = a.pid and l.granted and l.database = a.datid and n.nspname = {schema_literal}
           ) as holds
    from pg_catalog.pg_stat_activity a
    where a.datname = pg_catalog.current_database() and a.pid <> pg_catalog.pg_backend_pid()
      and (a.xact_start is null or a.xact_start <= clock_timestamp() - make_interval(secs => $1::float8))
)
select pid, application_name, backend_type, state, query_age
from candidates
where holds or (xact_start is not null and not exists (select from candidates where holds))
order by xact_start nulls last, pid
