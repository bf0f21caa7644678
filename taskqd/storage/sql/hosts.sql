-- The statements of the processes that maintain a schema: who they are, and which worker stands in for them.
-- A host is alive while its beat is less than so many seconds old, or as far ahead where the clock was set back.

-- name: enlist_host
-- Announces this process. Primary key.
insert into {schema}.maintenance_hosts (host_id, kind, complete, hostname, pid, worker_group)
values ($1::uuid, $2::text, $3::bool, $4::text, $5::int, $6::text)
on conflict (host_id) do nothing

-- name: beat_host
-- Proves that maintenance advances: stamps each duty that has run since the last beat. Answers whether this host comes
-- first: the oldest scheduler, else the oldest other host that does everything, a worker that stands in last of all. No
-- row: somebody has taken its place, or the row away. Primary key, HOT; then a handful of rows.
with beaten as (
    update {schema}.maintenance_hosts set
        beat_at = clock_timestamp(),
        tick_at = case when $2::bool then clock_timestamp() else tick_at end,
        promoted_at = case when $3::bool then clock_timestamp() else promoted_at end
    where host_id = $1::uuid
    returning host_id, complete, place, started_at
)
select b.complete and not exists (
    select from {schema}.maintenance_hosts h
    where h.complete and abs(extract(epoch from clock_timestamp() - h.beat_at)) < $4::float8
      and (h.place, h.started_at, h.host_id) < (b.place, b.started_at, b.host_id)
) as first
from beaten b

-- name: unattended
-- Whether no living process maintains the schema. A handful of rows.
select not exists (
    select from {schema}.maintenance_hosts h
    where h.complete and abs(extract(epoch from clock_timestamp() - h.beat_at)) < $1::float8
)

-- name: stand_in
-- Makes this worker the one that stands in, unless a process lives ($5) that maintains the schema; answers true when it is.
-- The one row of its kind changes hands. Unique index maintenance_hosts_fallback; locks that row.
insert into {schema}.maintenance_hosts as held (host_id, kind, complete, hostname, pid, worker_group)
select $1::uuid, 'fallback', true, $2::text, $3::int, $4::text
where not exists (
    select from {schema}.maintenance_hosts h
    where h.complete and h.host_id <> $1::uuid and abs(extract(epoch from clock_timestamp() - h.beat_at)) < $5::float8
)
on conflict (kind) where kind = 'fallback' do update set
    host_id = excluded.host_id, hostname = excluded.hostname, pid = excluded.pid, worker_group = excluded.worker_group,
    started_at = clock_timestamp(), beat_at = clock_timestamp(), tick_at = null, promoted_at = null
where held.host_id = excluded.host_id or abs(extract(epoch from clock_timestamp() - held.beat_at)) >= $5::float8
returning true

-- name: withdraw_host
-- The host ends on purpose: its row goes, so that nobody need wait for it to grow old. Primary key.
delete from {schema}.maintenance_hosts where host_id = $1::uuid

-- name: forget_hosts
-- Rows of hosts that died a day ago or longer. A handful of rows.
delete from {schema}.maintenance_hosts where beat_at < clock_timestamp() - interval '1 day'
