-- What `taskqd doctor` looks at. Nothing here writes or locks a row; each statement is bounded by the session's
-- statement_timeout.

-- name: objects
-- What the schema $1 is made of, and how each part is defined. Small catalogs; the search path must be empty, so that every
-- name in a definition is qualified. A constraint that Postgres 18 makes of `not null` is part of its column.
with tables as (
    select c.oid, c.relname::text as name
    from pg_class c join pg_namespace n on n.oid = c.relnamespace
    where n.nspname = $1::text and c.relkind in ('r', 'p')
)
select 'table' as kind, name as owner, '' as part, '' as definition from tables
union all
select 'column', t.name, a.attname::text, concat_ws(' ', format_type(a.atttypid, a.atttypmod),
    case when l.collname <> 'default' then 'collate ' || l.collname end,
    case when a.attnotnull then 'not null' end,
    case when a.attidentity <> '' then 'identity' end,
    case when a.attgenerated <> '' then 'generated' end,
    pg_get_expr(d.adbin, d.adrelid))
from tables t
join pg_attribute a on a.attrelid = t.oid and a.attnum > 0 and not a.attisdropped
left join pg_attrdef d on d.adrelid = a.attrelid and d.adnum = a.attnum
left join pg_collation l on l.oid = a.attcollation
union all
select 'index', t.name, i.relname::text,
    pg_get_indexdef(i.oid) || case when x.indisvalid and x.indisready then '' else ' (invalid)' end
from tables t join pg_index x on x.indrelid = t.oid join pg_class i on i.oid = x.indexrelid
union all
select 'constraint', t.name, k.conname::text, pg_get_constraintdef(k.oid)
from tables t join pg_constraint k on k.conrelid = t.oid
where k.contype <> 'n'
union all
select 'trigger', t.name, g.tgname::text,
    pg_get_triggerdef(g.oid) || case when g.tgenabled = 'D' then ' (disabled)' else '' end
from tables t join pg_trigger g on g.tgrelid = t.oid
where not g.tgisinternal
union all
select 'function', p.proname || '(' || oidvectortypes(p.proargtypes) || ')', '', pg_get_functiondef(p.oid)
from pg_proc p join pg_namespace n on n.oid = p.pronamespace
where n.nspname = $1::text and p.prokind in ('f', 'p')
union all
select 'type', y.typname::text, '', string_agg(e.enumlabel, ', ' order by e.enumsortorder)
from pg_type y join pg_namespace n on n.oid = y.typnamespace join pg_enum e on e.enumtypid = y.oid
where n.nspname = $1::text
group by y.typname

-- name: parameters
-- How many parameters the prepared statement of this session has that is called `probe`.
select cardinality(parameter_types) from pg_prepared_statements where name = 'probe'

-- name: snapshots
-- Who keeps vacuum from removing dead rows of this database, for $1 seconds or longer; what has no time is measured in
-- transactions ($2). A session of another role shows nothing to one without pg_read_all_stats.
select 'session' as kind, a.pid::text as id, coalesce(a.usename, '') as who, coalesce(a.application_name, '') as name,
    coalesce(a.state, '') as state, extract(epoch from clock_timestamp() - a.xact_start)::float8 as age,
    null::int as transactions
from pg_stat_activity a
where a.datname = current_database() and a.pid <> pg_backend_pid()
  and (a.backend_xmin is not null or a.backend_xid is not null) and a.backend_type <> 'autovacuum worker'
  and a.xact_start < clock_timestamp() - make_interval(secs => $1::float8)
union all
select 'prepared transaction', p.gid, p.owner, '', '', extract(epoch from clock_timestamp() - p.prepared)::float8, null
from pg_prepared_xacts p
where p.database = current_database() and p.prepared < clock_timestamp() - make_interval(secs => $1::float8)
union all
select 'replication slot', s.slot_name::text, '', coalesce(s.plugin::text, ''),
    case when s.active then 'active' else 'inactive' end, null, age(s.xmin)
from pg_replication_slots s
where age(s.xmin) > $2::int
union all
select 'standby', a.pid::text, coalesce(a.usename, ''), coalesce(a.application_name, ''), '', null, age(a.backend_xmin)
from pg_stat_activity a
where a.backend_type = 'walsender' and age(a.backend_xmin) > $2::int

-- name: sees_all
-- Whether this role sees what the sessions of others do.
select pg_has_role(current_user, 'pg_read_all_stats', 'usage')

-- name: tables
-- What vacuum makes of the tables, and how they are told to be vacuumed.
select c.relname::text as name, coalesce(s.n_live_tup, 0) as live, coalesce(s.n_dead_tup, 0) as dead,
    extract(epoch from clock_timestamp() - greatest(s.last_vacuum, s.last_autovacuum))::float8 as vacuumed_ago,
    coalesce(c.reloptions, '{}') as options
from pg_class c join pg_namespace n on n.oid = c.relnamespace left join pg_stat_all_tables s on s.relid = c.oid
where n.nspname = {schema_literal} and c.relkind = 'r'
order by c.relname

-- name: vacuum_settings
-- Whether the server vacuums by itself at all.
select current_setting('autovacuum')::bool as autovacuum, current_setting('track_counts')::bool as track_counts

-- name: clock
-- The database's time, in seconds since the epoch.
select extract(epoch from clock_timestamp())::float8

-- name: own_settings
-- What a session is given that asks for nothing.
select current_setting('jit')::bool as jit, pg_backend_pid() as pid, current_user as who

-- name: stick
-- Leaves a mark ($1) on the session.
select set_config('taskqd.doctor', $1::text, false)

-- name: stuck
-- Reads the mark.
select current_setting('taskqd.doctor', true)

-- name: notify
-- Sends a notification to the channel $1.
select pg_notify($1::text, '')

-- name: live_workers
-- The workers that were seen within $1 seconds and are not stopping.
select id, hostname, pid, queues, max_concurrency from {schema}.workers
where last_seen_at > clock_timestamp() - make_interval(secs => $1::float8) and dead_at is null and stopping_at is null

-- name: waiting
-- For each route with pending jobs, the actors among the first $1 of its rows: how many there are, how long the oldest has
-- waited since it was due and there, and whether the actor is known. What nobody claims stays in front. Serves from
-- jobs_claim, one walk a route.
with recursive routes(route) as (
    (select j.route from {schema}.jobs j where j.status = 'pending' order by j.route limit 1)
    union all
    select (select j.route from {schema}.jobs j where j.status = 'pending' and j.route > r.route order by j.route limit 1)
    from routes r where r.route is not null
)
select r.route, w.actor, count(*) as jobs,
    extract(epoch from clock_timestamp() - min(greatest(w.scheduled_at, w.created_at)))::float8 as oldest,
    c.actor is not null as known, coalesce(c.max_concurrent = 0, false) as drained,
    exists (select from {schema}.queues q where q.name = r.route and q.paused_at is not null) as paused
from routes r
cross join lateral (
    select j.actor, j.scheduled_at, j.created_at from {schema}.jobs j
    where j.status = 'pending' and j.route = r.route
    order by j.route, j.lane, j.priority desc, j.scheduled_at
    limit $1::int
) w
left join {schema}.actor_config c on c.actor = w.actor
where r.route is not null
group by r.route, w.actor, c.actor, c.max_concurrent
order by r.route, w.actor

-- name: overdue
-- Scheduled jobs that are due and still not claimable, counted up to $1, and seconds since the first was due and there.
-- Serves from jobs_due.
select count(*) as jobs,
    extract(epoch from clock_timestamp() - min(greatest(d.scheduled_at, d.created_at)))::float8 as oldest
from (
    select scheduled_at, created_at from {schema}.jobs
    where status = 'scheduled' and scheduled_at <= statement_timestamp()
    order by scheduled_at
    limit $1::int
) d

-- name: running
-- The job that has run longest, and what leases say. Serves from the small running index.
select count(*) as jobs,
    count(*) filter (where lock_expires_at < clock_timestamp() - make_interval(secs => $1::float8)) as expired,
    extract(epoch from clock_timestamp() - min(coalesce(started_at, claimed_at)))::float8 as oldest,
    (array_agg(id::text order by coalesce(started_at, claimed_at)))[1] as oldest_id,
    (array_agg(actor order by coalesce(started_at, claimed_at)))[1] as oldest_actor
from {schema}.jobs where status = 'running'

-- name: actor_caps
-- What limits each actor, beside what limits its queue and what its gate says. Small tables.
select c.actor, c.queue, c.max_concurrent, c.max_pending, q.max_concurrent as queue_limit, g.cap as gate
from {schema}.actor_config c
left join {schema}.queues q on q.name = c.queue
left join (select bucket, sum(cap) as cap from {schema}.gates group by bucket) g on g.bucket = 'a:' || c.actor
order by c.actor

-- name: queue_caps
-- What limits each queue, and what its gate says; whether it is paused. Small tables.
select q.name, q.max_concurrent, q.paused_at is not null as paused, g.cap as gate
from {schema}.queues q
left join (select bucket, sum(cap) as cap from {schema}.gates group by bucket) g on g.bucket = 'q:' || q.name
order by q.name

-- name: gates
-- Gates whose count is not that of the running jobs that hold them. Both change in one transaction, so that one snapshot
-- tells. Serves from the small running index.
select g.bucket, g.held, coalesce(r.jobs, 0) as running
from {schema}.gates g
left join (
    select h.id, count(*) as jobs from {schema}.jobs j cross join lateral unnest(j.held_gates) h(id)
    where j.status = 'running' group by h.id
) r on r.id = g.id
where g.held <> coalesce(r.jobs, 0)
order by g.bucket

-- name: schedules
-- What keeps a schedule from firing. The table is small.
select s.name, s.actor, s.enabled, s.disabled_by, s.last_error, s.consecutive_failures,
    extract(epoch from statement_timestamp() - greatest(s.next_fire_at, s.retry_not_before, s.created_at))::float8 as late,
    exists (select from {schema}.actor_config c where c.actor = s.actor) as known
from {schema}.schedules s
where s.retired_at is null
order by s.name

-- name: hosts
-- The processes that maintain the schema, and how long ago each said so.
select kind, complete, hostname, pid, extract(epoch from clock_timestamp() - beat_at)::float8 as beat_ago
from {schema}.maintenance_hosts order by beat_at desc

-- name: duties
-- The last run of each duty of maintenance, and what went wrong in it.
select duty, extract(epoch from clock_timestamp() - last_finished_at)::float8 as finished_ago, last_error,
    extract(epoch from clock_timestamp() - last_error_at)::float8 as error_ago
from {schema}.maintenance order by duty
