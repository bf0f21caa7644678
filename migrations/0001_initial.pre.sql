-- min_code: 1
-- Everything that taskqd stores. Statuses and their meaning: docs/architecture.md; decisions: docs/adr/0001-founding.md.

create type {schema}.job_status as enum (
    'scheduled', 'pending', 'running', 'succeeded', 'failed', 'cancelled', 'crashed', 'abandoned'
);

-- One row a job, from enqueue to retention. It holds the current, or last, attempt; older ones are in job_attempts.
create table {schema}.jobs (
    id                       uuid primary key,
    created_at               timestamptz not null default clock_timestamp(),
    scheduled_at             timestamptz not null default clock_timestamp(),
    claimed_at               timestamptz,
    started_at               timestamptz,
    finished_at              timestamptz,
    lock_expires_at          timestamptz,  -- not null exactly while running; never indexed, so that renewals stay HOT
    last_heartbeat_at        timestamptz,
    schedule_to_close        timestamptz,
    cancel_requested_at      timestamptz,
    result_expires_at        timestamptz,
    start_to_close           interval,
    heartbeat_timeout        interval,
    worker_id                uuid,         -- who holds it, or held it last
    batch_id                 uuid,
    epoch                    integer not null default 0,
    attempt                  integer not null default 0,
    max_attempts             integer not null default 3 check (max_attempts >= 1),
    interrupt_count          integer not null default 0,
    snooze_count             integer not null default 0,
    rate_limit_blocked_count integer not null default 0,
    progress_seq             integer not null default 0,
    result_size_bytes        integer,
    retry_base               real not null default 5,
    retry_cap                real not null default 3600,
    retry_jitter             real not null default 0.2,  -- a share; -1 is full jitter
    priority                 smallint not null default 0,
    cancel_phase             smallint not null default 0 check (cancel_phase between 0 and 2),
    status                   {schema}.job_status not null default 'pending',
    serial                   boolean not null default false,
    singleton                boolean not null default false,
    capped                   boolean not null default false,  -- counts against its actor's max_pending
    unique_while_active      boolean not null default false,
    idempotency_freed        boolean not null default false,
    retry_kind               text not null default 'transient'
                             check (retry_kind in ('transient', 'indefinite', 'non_retryable')),
    retry_backoff            text not null default 'exponential'
                             check (retry_backoff in ('exponential', 'linear', 'fixed')),
    queue                    text not null,  -- the label it was enqueued with
    route                    text not null,  -- where it is claimed
    lane                     text collate "C" not null default '',  -- its place inside the route: lane_of()
    actor                    text not null,
    identity_key             text check (octet_length(identity_key) between 1 and 512),
    fairness_key             text check (octet_length(fairness_key) between 1 and 512),
    idempotency_scope        text not null default '' check (octet_length(idempotency_scope) <= 1300),
    idempotency_key          text check (octet_length(idempotency_key) <= 1300),
    payload_state            text not null default 'stored' check (payload_state in ('stored', 'deferred')),
    payload_schema_ver       text,
    error_class              text,
    error_message            text,
    error_traceback          text,
    trace_id                 text,
    span_id                  text,
    payload                  jsonb not null,
    result                   jsonb,
    progress_state           jsonb,
    metadata                 jsonb,
    tags                     text[],
    held_gates               integer[]  -- what it was claimed through, while it runs; null where nothing limits it
) with (
    fillfactor = 70,
    autovacuum_vacuum_scale_factor = 0.01,
    autovacuum_vacuum_insert_scale_factor = 0.05,
    autovacuum_vacuum_cost_limit = 2000
);

-- The indexes that a plain job enters.
create index jobs_claim on {schema}.jobs (route, lane, priority desc, scheduled_at, id) where status = 'pending';
create index jobs_due on {schema}.jobs (scheduled_at) where status = 'scheduled';
create index jobs_running on {schema}.jobs (worker_id) where status = 'running';
create index jobs_finished on {schema}.jobs (finished_at, id)
    where status in ('succeeded', 'failed', 'cancelled', 'crashed', 'abandoned');

-- The indexes of what a job may opt into.
create unique index jobs_idempotency on {schema}.jobs (idempotency_scope, idempotency_key)
    where idempotency_key is not null and not idempotency_freed;
create unique index jobs_serial on {schema}.jobs (lane) where status = 'running' and serial;
create unique index jobs_singleton on {schema}.jobs (actor)
    where singleton and status in ('scheduled', 'pending', 'running');
create index jobs_identity on {schema}.jobs (actor, identity_key, created_at) where identity_key is not null;
create index jobs_capped on {schema}.jobs (actor) where capped and status in ('scheduled', 'pending');
create index jobs_batch on {schema}.jobs (batch_id, id) where batch_id is not null;
create index jobs_batch_open on {schema}.jobs (batch_id, id)
    where batch_id is not null and status in ('scheduled', 'pending', 'running');
create index jobs_deadline on {schema}.jobs (schedule_to_close)
    where schedule_to_close is not null and status in ('scheduled', 'pending');
create index jobs_cancel on {schema}.jobs (worker_id, cancel_requested_at)
    where cancel_requested_at is not null and status = 'running';
create index jobs_result_expiry on {schema}.jobs (result_expires_at) where result_expires_at is not null;
create index jobs_tags on {schema}.jobs using gin (tags) where tags is not null;

-- Attempts that ended without ending their job, and ends that an operator's retry would overwrite.
create table {schema}.job_attempts (
    job_id          uuid not null references {schema}.jobs on delete cascade,
    epoch           integer not null,
    attempt         integer not null,
    worker_id       uuid,
    claimed_at      timestamptz,
    started_at      timestamptz,
    finished_at     timestamptz not null default clock_timestamp(),
    outcome         text not null check (outcome in
                    ('succeeded', 'failed', 'retried', 'snoozed', 'interrupted', 'crashed', 'cancelled', 'abandoned')),
    cause           text,
    error_class     text,
    error_message   text,
    error_traceback text,
    primary key (job_id, epoch)
);

-- What a person or a cursor needs later: reclaims, cancels, operator acts. Not a row per happy job.
create table {schema}.job_events (
    id          bigint generated always as identity primary key,
    job_id      uuid not null,
    occurred_at timestamptz not null default clock_timestamp(),
    kind        text not null,
    detail      jsonb not null default '{}'
) with (autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_insert_scale_factor = 0.05);
create index job_events_job on {schema}.job_events (job_id, id);

-- Ends that no worker saw, or had the time to tell, of actors with hooks. Whoever tells one deletes it.
create table {schema}.unseen_ends (
    job_id      uuid not null references {schema}.jobs on delete cascade,
    epoch       integer not null,
    actor       text not null,
    status      {schema}.job_status not null,
    taken_until timestamptz,
    primary key (job_id, epoch)
);

create table {schema}.workers (
    id                 uuid primary key,
    hostname           text not null,
    pid                integer not null,
    queues             text[] not null,
    max_concurrency    integer not null,
    worker_label       text,
    workgroup_instance uuid,
    worker_group       text,
    started_at         timestamptz not null default clock_timestamp(),
    last_seen_at       timestamptz not null default clock_timestamp(),
    stopping_at        timestamptz,  -- its rows are interrupts from here on, not crashes
    dead_at            timestamptz,  -- tombstone: its rows may be taken whatever their leases say
    asleep_at          timestamptz,  -- waits for a wake-up since
    metadata           jsonb not null default '{}'
) with (fillfactor = 50);

-- What each workgroup has declared that it may hold, for the budget of its neighbours: connections that reach the server,
-- opened as the role db_role. place: the host, and the runtime directory of its supervisor there. Renewed by its
-- processes; a row that has expired counts no more.
create table {schema}.groups (
    name        text not null,
    place       text not null,
    db_role     text not null,
    connections integer not null check (connections >= 0),
    declared_at timestamptz not null default clock_timestamp(),
    expires_at  timestamptz not null,
    primary key (name, place)
) with (fillfactor = 50);

-- Counters of strict limits: held = count of running jobs that hold the gate. A bucket is an actor's cap ('a:<actor>'), a
-- queue's ('q:<queue>') or a reservation ('r:<name>').
create table {schema}.gates (
    id     integer generated always as identity primary key,
    bucket text not null unique,
    cap    integer not null check (cap >= 0),
    held   integer not null default 0 check (held >= 0)
) with (fillfactor = 20);

create table {schema}.queues (
    name           text primary key,
    mode           text not null default 'strict_fifo' check (mode in ('strict_fifo', 'round_robin')),
    max_concurrent integer check (max_concurrent >= 1),
    paused_at      timestamptz,
    created_at     timestamptz not null default clock_timestamp(),
    updated_at     timestamptz not null default clock_timestamp()
);

-- Capacity and queue are the operator's: stored values win over the code. The rest is what the code last declared,
-- for jobs that SQL enqueues.
create table {schema}.actor_config (
    actor          text primary key,
    queue          text not null,
    max_concurrent integer check (max_concurrent >= 0),
    max_pending    integer check (max_pending >= 0),
    reservations   text[],  -- names of the reservations that its code asks for
    gated          boolean not null generated always as (max_concurrent is not null or reservations is not null) stored,
    result_ttl     interval,  -- how long a result is kept after its job's end; null: as long as the job
    retention      interval,  -- how long its ended jobs are kept, where that is shorter than the installation's
    max_attempts   integer not null,
    retry_kind     text not null,
    retry_backoff  text not null,
    retry_base     real not null,
    retry_cap      real not null,
    retry_jitter   real not null,
    time_budget    interval,
    priority       smallint not null default 0,
    has_hooks      boolean not null default false,  -- its code wants to be told of the ends of its jobs
    metadata       jsonb not null default '{}',
    created_at     timestamptz not null default clock_timestamp(),
    updated_at     timestamptz not null default clock_timestamp()
);

-- A batch that enqueue_batch opened. The counters follow the ends of its jobs; its jobs themselves are the truth.
create table {schema}.batches (
    id                   uuid primary key,
    status               text not null default 'active' check (status in ('active', 'complete', 'aborted')),
    queue                text,                           -- of its first job
    total                integer not null default 0,     -- jobs, as counted at its opening, its end and by the sweep
    succeeded            integer not null default 0,
    failed               integer not null default 0,
    cancelled            integer not null default 0,
    crashed              integer not null default 0,
    abandoned            integer not null default 0,
    consecutive_failures integer not null default 0,
    failure_threshold    integer check (failure_threshold >= 1),
    finalizer_job_id     uuid,
    finalized_at         timestamptz,                    -- when the finalizer was let go
    created_at           timestamptz not null default clock_timestamp(),
    completed_at         timestamptz,                    -- when none of its jobs was in flight any more
    count_again_at       timestamptz not null default clock_timestamp() + interval '1 minute'
) with (fillfactor = 50);
create index batches_created on {schema}.batches (created_at desc, id desc);
create index batches_unfinished on {schema}.batches (count_again_at)
    where completed_at is null or (finalizer_job_id is not null and finalized_at is null);
create index batches_aborted on {schema}.batches (id) where status = 'aborted' and completed_at is null;

-- Batches that a sweep could not count at once, because somebody held them: recounted by the next tick.
create table {schema}.batch_recounts (batch_id uuid not null);

-- When which actor is to run. `next_fire_at` is the next slot; -infinity: to be found by the scheduler, from then on.
create index batches_completed on {schema}.batches (completed_at) where completed_at is not null;

create table {schema}.schedules (
    id                   uuid primary key,
    name                 text not null unique check (octet_length(name) between 1 and 200),
    source               text not null check (source in ('decorator', 'manifest', 'api', 'system')),
    actor                text not null,
    kind                 text not null check (kind in ('cron', 'every')),
    expression           text not null,  -- of `every`: seconds
    timezone             text not null default 'UTC',
    dst_strategy         text not null default 'skip' check (dst_strategy in ('skip', 'firstof', 'allof')),
    catch_up             text not null default 'fire_once' check (catch_up in ('fire_once', 'fire_all', 'skip')),
    catch_up_max         integer not null default 100 check (catch_up_max between 1 and 1000),  -- slots a decision
    catch_up_window      interval,  -- a slot later than this is passed over; null: none is too late
    overlap              text not null default 'allow' check (overlap in ('allow', 'forbid')),
    smear                interval,
    payload              jsonb,
    payload_factory      text,      -- the function that makes the payload, in the worker that runs the job
    options              jsonb not null default '{}',  -- of the jobs it fires: queue, priority, tags, …
    identity_key         text,
    enabled              boolean not null default true,
    disabled_by          text check (disabled_by in ('auto', 'operator')),
    retired_at           timestamptz,
    version              integer not null default 1,
    next_fire_at         timestamptz not null default '-infinity',
    last_fired_at        timestamptz,
    last_job_id          uuid,
    ran_now_at           timestamptz,
    last_error           text,
    last_error_at        timestamptz,
    consecutive_failures integer not null default 0,
    retry_not_before     timestamptz,
    claim_token          uuid,      -- the fence of a scheduler that decides on it
    claim_as_of          timestamptz,
    claimed_by           uuid,
    claim_expires_at     timestamptz,
    created_at           timestamptz not null default clock_timestamp(),
    updated_at           timestamptz not null default clock_timestamp(),
    check (payload is null or payload_factory is null)
) with (fillfactor = 50);
create index schedules_due on {schema}.schedules (next_fire_at) where enabled and retired_at is null;

-- Why a schedule did, or did not, fire: one row a decision, one row a slot that was decided on. The second is what keeps a
-- slot from firing twice. Both are written under a lock of the schedule, which nobody deletes, and refer to it unchecked.
create table {schema}.schedule_decisions (
    id          uuid primary key,
    schedule_id uuid not null,
    version     integer not null,
    action      text not null check (action in ('initialized', 'fired', 'run_now', 'backfilled', 'error', 'auto_paused',
                'created', 'changed', 'paused', 'resumed', 'retired')),
    decided_at  timestamptz not null default clock_timestamp(),
    decided_by  uuid,  -- a scheduler or a worker; null: a person
    as_of       timestamptz,
    cursor_from timestamptz,
    cursor_to   timestamptz,
    fired       integer not null default 0,  -- jobs made
    suppressed  integer not null default 0,  -- slots whose job another one kept out
    skipped     integer not null default 0,  -- slots passed over, counted up to 10,000 a decision
    reason      text
);
create index schedule_decisions_decided on {schema}.schedule_decisions (decided_at);
create index schedule_decisions_schedule on {schema}.schedule_decisions (schedule_id, decided_at desc);

create table {schema}.schedule_occurrences (
    schedule_id uuid not null,
    due_at      timestamptz not null,
    decision_id uuid not null,
    job_id      uuid,
    outcome     text not null check (outcome in ('fired', 'overlapped', 'suppressed')),
    created_at  timestamptz not null default clock_timestamp(),
    primary key (schedule_id, due_at)
);
create index schedule_occurrences_decision on {schema}.schedule_occurrences (decision_id);

-- One row a process that maintains the schema; its age tells whether that is done. `complete`: every duty, schedules
-- among them, so that no worker need stand in. `fallback`: the one worker that does, while there is nobody else.
create table {schema}.maintenance_hosts (
    host_id      uuid primary key,
    kind         text not null check (kind in ('scheduler', 'worker', 'fallback', 'runtime')),
    place        smallint not null generated always as
        (case kind when 'scheduler' then 0 when 'fallback' then 2 else 1 end) stored,
    complete     boolean not null default true,
    hostname     text not null,
    pid          integer not null,
    worker_group text,
    started_at   timestamptz not null default clock_timestamp(),
    beat_at      timestamptz not null default clock_timestamp(),
    tick_at      timestamptz,
    promoted_at  timestamptz
) with (fillfactor = 50);
create unique index maintenance_hosts_fallback on {schema}.maintenance_hosts (kind) where kind = 'fallback';

-- The last run of each maintenance duty.
create table {schema}.maintenance (
    duty             text primary key,
    last_started_at  timestamptz,
    last_finished_at timestamptz,
    last_error       text,
    last_error_at    timestamptz,
    cursor           jsonb
) with (fillfactor = 50);

create table {schema}.rate_limit_buckets (
    bucket_name  text primary key,
    kind         text not null check (kind in ('token_bucket', 'sliding_window', 'gcra')),
    keyed        boolean not null default false,
    state        jsonb not null default '{}',
    last_used_at timestamptz not null default clock_timestamp(),
    updated_at   timestamptz not null default clock_timestamp()
) with (fillfactor = 50);

create table {schema}.rate_limit_window_entries (
    bucket_name text not null,
    ts          timestamptz not null,
    request_id  uuid not null,
    primary key (bucket_name, ts, request_id)
);

-- Which installation this schema is. Enforced once an operator binds an environment to it.
create table {schema}.target_identity (
    singleton       boolean primary key default true check (singleton),
    installation_id uuid not null,
    environment     text,
    version         integer not null default 0,
    bound_at        timestamptz,
    bound_by        text
);

create table {schema}.admin_audit (
    id          bigint generated always as identity primary key,
    at          timestamptz not null default clock_timestamp(),
    principal   text not null,
    action      text not null,
    target_type text not null,
    target_id   text not null,
    reason      text,
    detail      jsonb not null default '{}'
);

-- History, moved here by retention. The live columns first, in the live order.
create table {schema}.jobs_archive (
    like {schema}.jobs,
    archived_at timestamptz not null default clock_timestamp(),
    expire_at   timestamptz not null,
    primary key (id)
);
create index jobs_archive_expire on {schema}.jobs_archive (expire_at);
create index jobs_archive_finished on {schema}.jobs_archive (finished_at, id);

create table {schema}.job_attempts_archive (
    like {schema}.job_attempts,
    archived_at timestamptz not null default clock_timestamp(),
    primary key (job_id, epoch),
    foreign key (job_id) references {schema}.jobs_archive on delete cascade
);

-- A UUIDv7 (RFC 9562) for what SQL creates: a random v4 with the millisecond laid over its head and the version raised.
create function {schema}.uuid7() returns uuid
language sql volatile parallel safe as $$
    select encode(
        set_bit(set_bit(
            overlay(uuid_send(gen_random_uuid())
                    placing substring(int8send((extract(epoch from clock_timestamp()) * 1000)::bigint) from 3)
                    from 1 for 6),
            52, 1), 53, 1),
        'hex')::uuid
$$;

insert into {schema}.target_identity (installation_id) values ({schema}.uuid7());

-- Answers the installation to whoever was configured for it, and raises TQ422 for anybody else: every process asks before
-- it writes anything. One that expects an installation is told of another even where no environment is bound. What it
-- expects must come from its configuration, never from here. Whoever may use the schema may ask.
create function {schema}.attest(expected_environment text, expected_installation uuid) returns uuid
language plpgsql stable security definer set search_path = '' as $$
declare
    here {schema}.target_identity%rowtype;
begin
    select * into here from {schema}.target_identity;
    if not found then
        raise exception 'it has lost its identity' using errcode = 'TQ422';
    end if;
    if here.environment is distinct from expected_environment and here.environment is not null then
        raise exception 'it is bound to environment ''%'', the one expected is %', here.environment,
            coalesce(quote_literal(expected_environment), 'none (TASKQ_ENVIRONMENT)') using errcode = 'TQ422';
    end if;
    if here.installation_id <> expected_installation then
        raise exception 'it is installation …%, the one expected is …%', right(here.installation_id::text, 8),
            right(expected_installation::text, 8) using errcode = 'TQ422';
    end if;
    return here.installation_id;
end
$$;

-- Tells sleeping workers of this schema that there may be work. Latency only: they poll as well.
create function {schema}.wake() returns void
language sql volatile as $$
    select pg_notify(
        'taskq_wake_' || left(encode(sha256(convert_to({schema_literal}, 'UTF8')), 'hex'), 10), '')
$$;

-- Tells workers, at commit, that running jobs of theirs were cancelled.
create function {schema}.notify_cancel() returns void
language sql volatile as $$
    select pg_notify(
        'taskq_cancel_' || left(encode(sha256(convert_to({schema_literal}, 'UTF8')), 'hex'), 10), '')
$$;

-- How long a job that spent `attempt` attempts waits before the next. One curve for failures and crashes.
create function {schema}.retry_delay(attempt integer, backoff text, base real, cap real, jitter real) returns interval
language sql volatile parallel safe as $$
    select make_interval(secs => least(cap::float8,
        least(cap::float8, case backoff
            when 'exponential' then base::float8 * power(2::float8, least(greatest(attempt, 1) - 1, 60))
            when 'linear' then base::float8 * greatest(attempt, 1)
            else base::float8
        end) * case when jitter < 0 then random() else 1 - jitter + 2 * jitter * random() end))
$$;

-- The lane of a job inside its route, by the first that applies: its identity (one runs at a time), its actor where that is
-- limited, its fairness key where the queue takes turns, else the plain lane ''.
create function {schema}.lane_of(actor text, identity_key text, fairness_key text, gated boolean, round_robin boolean)
returns text
language sql immutable parallel safe as $$
    select case when identity_key is not null then 'i:' || actor || e'\x1f' || identity_key
                when gated then 'a:' || actor
                when fairness_key is not null and round_robin then 'f:' || fairness_key
                else '' end
$$;

-- The same by what is stored now of the actor and the route.
create function {schema}.lane_now(actor text, route text, identity_key text, fairness_key text) returns text
language sql stable parallel safe as $$
    select {schema}.lane_of(lane_now.actor, identity_key, fairness_key,
        coalesce((select c.gated from {schema}.actor_config c where c.actor = lane_now.actor), false),
        coalesce((select q.mode = 'round_robin' from {schema}.queues q where q.name = lane_now.route), false))
$$;

-- Lets `new_cap` jobs through a gate at once. What already runs keeps its place: a gate above its cap admits nobody until it
-- is below.
create function {schema}.set_gate(gate text, new_cap integer) returns void
language sql volatile as $$
    insert into {schema}.gates as g (bucket, cap) values (gate, new_cap)
    on conflict (bucket) do update set cap = excluded.cap where g.cap <> excluded.cap
$$;

-- Whoever stores a cap, whichever way, sets its gate in the same transaction.
create function {schema}.set_actor_gate() returns trigger
language plpgsql as $$
begin
    if new.max_concurrent is not null then
        perform {schema}.set_gate('a:' || new.actor, new.max_concurrent);
    end if;
    perform {schema}.wake();
    return null;
end
$$;
create trigger set_gate after insert or update of max_concurrent on {schema}.actor_config
    for each row execute function {schema}.set_actor_gate();

create function {schema}.set_queue_gate() returns trigger
language plpgsql as $$
begin
    if new.max_concurrent is not null then
        perform {schema}.set_gate('q:' || new.name, new.max_concurrent);
    end if;
    perform {schema}.wake();
    return null;
end
$$;
create trigger set_gate after insert or update on {schema}.queues
    for each row execute function {schema}.set_queue_gate();

-- Gives back what jobs held that no longer run: one entry of `gates` a job and gate. Locks gates in id order. Claims and
-- settlements hold one for milliseconds; who holds it for longer is not waited for, or all others would wait behind it.
create function {schema}.free_gates(gates integer[]) returns void
language plpgsql volatile set lock_timeout = '1s' as $$
begin
    perform from {schema}.gates g where g.id = any(gates) order by g.id for no key update;
    update {schema}.gates g set held = greatest(0, g.held - given.jobs)
    from (select id, count(*)::int as jobs from unnest(gates) id group by id) given
    where g.id = given.id;
end
$$;

-- Repairs gates whose count is not that of the running jobs that hold them; both change in one transaction, so that one
-- snapshot tells. Locks each such gate and counts again under the lock. Returns gates repaired.
create function {schema}.audit_gates(max_rows integer) returns integer
language plpgsql volatile as $$
declare
    gate integer;
    counted integer;
    repaired integer := 0;
begin
    for gate in
        select g.id from {schema}.gates g
        left join (select h.id, count(*) as jobs from {schema}.jobs j cross join lateral unnest(j.held_gates) h(id)
                   where j.status = 'running' group by h.id) running on running.id = g.id
        where g.held <> coalesce(running.jobs, 0)
        order by g.id
        limit max_rows
    loop
        perform from {schema}.gates g where g.id = gate for no key update skip locked;
        if found then
            select count(*) into counted from {schema}.jobs j where j.status = 'running' and gate = any(j.held_gates);
            update {schema}.gates g set held = counted where g.id = gate and g.held <> counted;
            repaired := repaired + found::int;
        end if;
    end loop;
    return repaired;
end
$$;

-- Claims from lanes that need more than a look at their heads. A unit is one of
--   {"kind": "lane", "route", "lane"}: one lane, in its order;
--   {"kind": "fair", "route", "first", "after"}: the lanes of fairness keys, in turns;
--   {"kind": "serial", "route", "actor", "first", "after"}: identities of one actor, of which none runs;
-- each with its "gates", both walks over the lanes `first` and then those after the lane `after`. A unit claims what every
-- gate of it has room for, and counts that in the same transaction: a limit is never passed. `known` are the actors to take
-- from mixed lanes. Nothing here waits for a lock. Serves from jobs_claim, for identities also from jobs_serial, which is the arbiter between two claimers: on unique_violation claim again.
-- Answers the jobs, and after those of each unit a row without a job: `note` is full, contended (somebody else was at its
-- gates), short or more, and `lane` is how far its walk looked, null for to the end.
create function {schema}.claim_lanes(room integer, worker uuid, lease float8, known text[], units jsonb)
returns table (
    unit integer, note text, lane text, id uuid, epoch integer, actor text, payload text, attempt integer, route text,
    priority smallint, scheduled_at timestamptz, batch_id uuid, start_to_close float8, progress_state text,
    progress_seq integer
)
-- said to cost nothing, so that a settlement that may claim here is not planned anew each time that it does not
language plpgsql volatile cost 1 rows 1 as $$
#variable_conflict use_column
declare
    the_unit jsonb;
    kind text;
    home text;
    wanted text;
    open integer;  -- what the gates have room for; null without any
    free integer;
    got integer;
    gate record;
    passed integer[];
    low text;
    high text;
    lanes text[];
    steps integer;
begin
    unit := 0;
    for the_unit in select value from jsonb_array_elements(units) with ordinality order by ordinality loop
        exit when room <= 0;
        kind := the_unit ->> 'kind';
        home := the_unit ->> 'route';
        open := null;
        got := 0;
        passed := null;
        note := null;
        lane := null;
        for wanted in select value from jsonb_array_elements_text(the_unit -> 'gates') order by value collate "C" loop
            select g.id, g.cap - g.held as free into gate from {schema}.gates g
                where g.bucket = wanted and g.held < g.cap
                for no key update skip locked;
            if not found then
                note := case when exists (select from {schema}.gates g where g.bucket = wanted and g.held < g.cap)
                             then 'contended' else 'full' end;
                exit;
            end if;
            passed := passed || gate.id;
            open := least(open, gate.free);
        end loop;
        free := least(room, open);
        if note is null then
            if kind = 'lane' then
                lanes := array[the_unit ->> 'lane'];
            else
                low := case kind when 'serial' then 'i:' || (the_unit ->> 'actor') || e'\x1f' else 'f:' end;
                high := case kind when 'serial' then 'i:' || (the_unit ->> 'actor') || ' ' else 'g' end;
                with recursive walk(lane, step) as (
                    (select j.lane, 1 from {schema}.jobs j
                     where j.status = 'pending' and j.route = home and j.lane < high collate "C"
                       and j.lane > greatest(low, the_unit ->> 'after' collate "C")
                     order by j.lane limit 1)
                    union all
                    (select x.lane, w.step + 1
                     from walk w cross join lateral (
                        select j.lane from {schema}.jobs j
                        where j.status = 'pending' and j.route = home and j.lane < high collate "C" and j.lane > w.lane
                        order by j.lane limit 1
                     ) x
                     where w.step < 2 * free + 64)
                )
                select array_agg(w.lane order by w.lane), count(*), max(w.lane)
                into lanes, steps, lane from walk w;
                if steps < 2 * free + 64 then
                    lane := null;
                end if;
                lanes := array(
                    select value from jsonb_array_elements_text(the_unit -> 'first') value
                    where kind = 'fair' or (value > low collate "C" and value < high collate "C")
                ) || lanes;
            end if;
            if kind = 'serial' then
                return query with head as materialized (
                    select x.ctid
                    from (select distinct l.lane from unnest(lanes) l(lane)
                          where not exists (select from {schema}.jobs r
                                            where r.status = 'running' and r.serial and r.lane = l.lane)) l
                    cross join lateral (
                        select j.ctid, j.actor, j.priority, j.scheduled_at from {schema}.jobs j
                        where j.status = 'pending' and j.route = home and j.lane = l.lane
                          and j.scheduled_at <= statement_timestamp()
                          and (j.schedule_to_close is null or j.schedule_to_close > clock_timestamp())
                        order by j.priority desc, j.scheduled_at, j.id
                        limit 1
                    ) x
                    where x.actor = the_unit ->> 'actor'
                    order by x.priority desc, x.scheduled_at
                    limit free
                ), taken as materialized (
                    -- `is true` keeps the planner from walking the pending index for what the ctid already says
                    select j.ctid from head h join {schema}.jobs j on j.ctid = h.ctid
                    where (j.status = 'pending') is true
                    for no key update of j skip locked
                )
                update {schema}.jobs j set
                    status = 'running', epoch = j.epoch + 1, attempt = j.attempt + 1, worker_id = worker,
                    claimed_at = clock_timestamp(), started_at = null, last_heartbeat_at = null,
                    lock_expires_at = clock_timestamp() + make_interval(secs => lease), held_gates = passed
                from taken t where j.ctid = t.ctid
                returning unit, null::text, j.lane, j.id, j.epoch, j.actor, j.payload::text, j.attempt, j.route, j.priority,
                    j.scheduled_at, j.batch_id, extract(epoch from j.start_to_close)::float8, j.progress_state::text,
                    j.progress_seq;
            else
                return query with taken as materialized (
                    select x.ctid from unnest(lanes) l(lane) cross join lateral (
                        select j.ctid from {schema}.jobs j
                        where j.status = 'pending' and j.route = home and j.lane = l.lane
                          and j.scheduled_at <= statement_timestamp()
                          and (left(l.lane, 2) = 'a:' or j.actor = any(known))
                          and (j.schedule_to_close is null or j.schedule_to_close > clock_timestamp())
                        order by j.priority desc, j.scheduled_at, j.id
                        -- within a lap one each; a lap that begins with few lanes shares the room among them
                        limit case when the_unit ->> 'after' is null then ceil(free::float8 / cardinality(lanes)) else 1 end
                        for no key update skip locked
                    ) x
                    limit free
                )
                update {schema}.jobs j set
                    status = 'running', epoch = j.epoch + 1, attempt = j.attempt + 1, worker_id = worker,
                    claimed_at = clock_timestamp(), started_at = null, last_heartbeat_at = null,
                    lock_expires_at = clock_timestamp() + make_interval(secs => lease), held_gates = passed
                from taken t where j.ctid = t.ctid
                returning unit, null::text, j.lane, j.id, j.epoch, j.actor, j.payload::text, j.attempt, j.route, j.priority,
                    j.scheduled_at, j.batch_id, extract(epoch from j.start_to_close)::float8, j.progress_state::text,
                    j.progress_seq;
            end if;
            get diagnostics got = row_count;
            if got > 0 and passed is not null then
                update {schema}.gates g set held = g.held + got where g.id = any(passed);
            end if;
            room := room - got;
            note := case when got < free then 'short' when got = open then 'full' else 'more' end;
        end if;
        return query select unit, note, lane, null::uuid, null::int, null::text, null::text, null::int, home, null::smallint,
            null::timestamptz, null::uuid, null::float8, null::text, null::int;
        unit := unit + 1;
    end loop;
end
$$;

-- Takes back rows whose lease, or heartbeat, ran out, and rows of tombstoned workers, oldest lease first. A row of a
-- worker that was stopping is an interrupt: it goes back to the queue and can never end the job. Any other is a crash:
-- it waits on the job's own retry curve, or ends it. `of_workers` limits it to the rows of these. Locks jobs only,
-- skipping what others hold. Returns rows taken.
create function {schema}.reap(max_rows integer, of_workers uuid[] default null) returns integer
language plpgsql volatile as $$
declare
    taken integer;
    repended integer;
    freed integer[];
    counted uuid[];
    news {schema}.job_status[];
begin
    if max_rows is null or max_rows not between 1 and 10000 then
        raise exception 'max_rows = % must be between 1 and 10000', max_rows using errcode = '22023';
    end if;
    with due as materialized (
        select j.id, j.actor, j.epoch, j.attempt, j.worker_id, j.claimed_at, j.started_at, j.held_gates,
            w.stopping_at is not null and j.cancel_requested_at is null as stopping,
            case when w.dead_at is not null then 'worker_dead'
                 when j.lock_expires_at < clock_timestamp() then 'lock_expired'
                 else 'heartbeat_timeout' end as cause,
            j.retry_kind <> 'non_retryable' and (j.retry_kind = 'indefinite' or j.attempt < j.max_attempts) as may_retry,
            {schema}.retry_delay(j.attempt, j.retry_backoff, j.retry_base, j.retry_cap, j.retry_jitter) as delay,
            j.schedule_to_close, j.cancel_requested_at is not null as cancelling
        from {schema}.jobs j
        left join {schema}.workers w on w.id = j.worker_id
        where j.status = 'running'
          and (of_workers is null or j.worker_id = any(of_workers))
          and (j.lock_expires_at < clock_timestamp()
               or w.dead_at is not null
               or (j.heartbeat_timeout is not null
                   and coalesce(j.last_heartbeat_at, j.claimed_at) + j.heartbeat_timeout < clock_timestamp()))
        order by j.lock_expires_at
        limit max_rows
        for update of j skip locked
    ), decided as materialized (
        select d.*, (case
            when d.cancelling then 'cancelled'
            when d.stopping then 'pending'
            when d.may_retry and d.schedule_to_close is not null and clock_timestamp() + d.delay >= d.schedule_to_close
                then 'failed'
            when d.may_retry and d.delay > interval '0' then 'scheduled'
            when d.may_retry then 'pending'
            else 'crashed' end)::{schema}.job_status as next
        from due d
    ), attempted as (
        insert into {schema}.job_attempts (job_id, epoch, attempt, worker_id, claimed_at, started_at, outcome, cause,
            error_class, error_message)
        select d.id, d.epoch, d.attempt, d.worker_id, d.claimed_at, d.started_at,
            case when d.stopping then 'interrupted' else 'crashed' end,
            case when d.stopping then 'worker_shutdown' else d.cause end,
            case when not d.stopping then 'WorkerCrashed' end,
            case when not d.stopping then 'the worker stopped renewing its lease' end
        from decided d
        on conflict (job_id, epoch) do nothing
    ), noted as (
        insert into {schema}.job_events (job_id, kind, detail)
        select d.id, 'state_change', jsonb_build_object('from_state', 'running', 'to_state', d.next,
            'reason', 'lock_expired', 'cause', case when d.stopping then 'worker_shutdown' else d.cause end,
            'worker_id', d.worker_id, 'attempt', d.attempt, 'epoch', d.epoch)
        from decided d
    ), untold as (
        insert into {schema}.unseen_ends (job_id, epoch, actor, status)
        select d.id, d.epoch + 1, d.actor, d.next
        from decided d join {schema}.actor_config c on c.actor = d.actor and c.has_hooks
        where d.next not in ('pending', 'scheduled')
    ), updated as (
        update {schema}.jobs j set
            status = d.next,
            epoch = j.epoch + 1,
            scheduled_at = case when d.next = 'scheduled' then clock_timestamp() + d.delay else j.scheduled_at end,
            finished_at = case when d.next in ('pending', 'scheduled') then null else clock_timestamp() end,
            claimed_at = case when d.next in ('pending', 'scheduled') then null else j.claimed_at end,
            started_at = case when d.next in ('pending', 'scheduled') then null else j.started_at end,
            worker_id = case when d.next in ('pending', 'scheduled') then null else j.worker_id end,
            lock_expires_at = null,
            last_heartbeat_at = null,
            cancel_requested_at = case when d.next in ('pending', 'scheduled') then null else j.cancel_requested_at end,
            cancel_phase = 0,
            interrupt_count = j.interrupt_count + d.stopping::int,
            idempotency_freed = j.unique_while_active and d.next not in ('pending', 'scheduled'),
            error_class = case when d.stopping then j.error_class when d.next = 'failed' then 'DeadlineExceeded'
                               when d.next = 'cancelled' then null else 'WorkerCrashed' end,
            error_message = case when d.stopping then j.error_message
                                 when d.next = 'failed' then 'schedule_to_close reached before next dispatch'
                                 when d.next = 'cancelled' then null
                                 else 'the worker stopped renewing its lease' end,
            held_gates = null,
            route = coalesce(c.queue, j.queue),
            lane = {schema}.lane_now(j.actor, coalesce(c.queue, j.queue), j.identity_key, j.fairness_key)
        from decided d left join {schema}.actor_config c on c.actor = d.actor
        where j.id = d.id
        returning j.status, j.batch_id, d.held_gates
    ), ended as (
        select batch_id, status from updated where batch_id is not null and status not in ('pending', 'scheduled')
    )
    select count(*), count(*) filter (where status = 'pending'),
        (select array_agg(gate) from updated cross join lateral unnest(held_gates) gate),
        (select array_agg(batch_id) from ended), (select array_agg(status) from ended)
    into taken, repended, freed, counted, news from updated;
    if freed is not null then
        perform {schema}.free_gates(freed);
    end if;
    if counted is not null then
        perform {schema}.count_batches(
            counted, array_fill('running'::{schema}.job_status, array[cardinality(news)]), news, false);
    end if;
    if repended > 0 then
        perform {schema}.wake();
    end if;
    return taken;
end
$$;

-- Declares workers dead whose processes are gone, and takes back what they hold by the rules of reap(). A claim of
-- theirs that commits later finds the tombstone, and the next reap() takes its rows whatever their leases say. Never
-- call it for a worker that may still live. Locks workers in id order, then jobs. Returns rows taken; as many as
-- max_rows mean that more may wait.
create function {schema}.release(dead_workers uuid[], max_rows integer) returns integer
language plpgsql volatile as $$
begin
    perform from {schema}.workers w
        where w.id = any(dead_workers) and w.dead_at is null
        order by w.id
        for no key update;
    update {schema}.workers w set dead_at = clock_timestamp()
        where w.id = any(dead_workers) and w.dead_at is null;
    return {schema}.reap(max_rows, coalesce(dead_workers, '{}'));
end
$$;

-- Lets the finalizers of these batches go: jobs that were held until year 9999 are due now. One that somebody holds
-- locked waits for the next tick. Call it with the batches locked.
create function {schema}.release_finalizers(of_batches uuid[]) returns void
language plpgsql volatile as $$
begin
    with held as materialized (
        select j.id from {schema}.batches b join {schema}.jobs j on j.id = b.finalizer_job_id
        where b.id = any(of_batches) and b.finalized_at is null
          and j.status = 'scheduled' and j.scheduled_at = '9999-12-31 00:00:00+00'
        for update of j skip locked
    )
    update {schema}.jobs j set status = 'pending', scheduled_at = clock_timestamp() from held h where j.id = h.id;
    if found then
        perform {schema}.wake();
    end if;
    update {schema}.batches b set finalized_at = clock_timestamp()
    where b.id = any(of_batches) and b.finalizer_job_id is not null and b.finalized_at is null
      and not exists (select from {schema}.jobs j
                      where j.id = b.finalizer_job_id and j.status = 'scheduled'
                        and j.scheduled_at = '9999-12-31 00:00:00+00');
end
$$;

-- Completes those of these batches that have no job in flight, and reopens those that have one again. Call it with the
-- batches locked, by a statement of its own after the one that locked them. Serves from jobs_batch_open, newest first:
-- what has ended stands at the other end. A range of one id leaves the planner no other order: by `=` it would walk the
-- primary key backwards. Planned once: planning it costs ten times as much as running it.
create function {schema}.close_batches(of_batches uuid[]) returns void
language plpgsql volatile
set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off
as $$
declare
    done uuid[];
begin
    with looked as materialized (
        select g.id, (
            select true from {schema}.jobs j
            where j.batch_id >= g.id and j.batch_id <= g.id and j.status in ('scheduled', 'pending', 'running')
            order by j.batch_id desc, j.id desc
            limit 1
        ) is not null as open
        from unnest(of_batches) g(id)
    )
    update {schema}.batches b set
        status = case when b.status = 'aborted' then 'aborted' when o.open then 'active' else 'complete' end,
        completed_at = case when o.open then null else clock_timestamp() end,
        total = case when o.open then b.total else b.succeeded + b.failed + b.cancelled + b.crashed + b.abandoned end
    from looked o
    where b.id = o.id and (b.completed_at is null) <> o.open;
    select array_agg(b.id) into done from {schema}.batches b
    where b.id = any(of_batches) and b.completed_at is not null
      and b.finalizer_job_id is not null and b.finalized_at is null;
    if done is not null then
        perform {schema}.release_finalizers(done);
    end if;
end
$$;

-- Counts edges of jobs into and out of terminal statuses in their batches: the job of batches[i] went from before[i] to
-- after[i]; an edge between two that are not terminal is none. Call it from the statement that changed the jobs, after
-- all of them, and for jobs of a batch only; null arrays are no edges. Locks batches in id order, after the jobs. One
-- that somebody holds for longer than 50 ms is left to the next tick, which recounts it: who holds a batch must not keep
-- its jobs from ending. With wait = false it is left at once: a sweep that has locked one does not wait for another. A
-- success ends a row of failures; failed and crashed lengthen it, after the successes of the same call, and
-- as many as the batch's failure_threshold abort it. An end taken back by an operator's retry makes an aborted batch
-- active again. Planned once, as close_batches().
create function {schema}.count_batches(
    batches uuid[], before {schema}.job_status[], after {schema}.job_status[], wait boolean default true
) returns void
language plpgsql volatile strict set lock_timeout = '50ms'
set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off
as $$
declare
    touched uuid[];
    news {schema}.job_status[];
    olds {schema}.job_status[];
    counts bigint[];
    locked uuid[];
    missing uuid[];
begin
    select array_agg(e.batch), array_agg(e.old), array_agg(e.new), array_agg(e.jobs) into touched, olds, news, counts
    from (select g.batch, g.old, g.new, count(*) as jobs from unnest(batches, before, after) g(batch, old, new)
          group by g.batch, g.old, g.new) e
    where e.old in ('succeeded', 'failed', 'cancelled', 'crashed', 'abandoned')
       or e.new in ('succeeded', 'failed', 'cancelled', 'crashed', 'abandoned');
    if touched is null then
        return;
    end if;
    locked := array(select b.id from {schema}.batches b where b.id = any(touched) order by b.id
                    for no key update skip locked);
    select array_agg(b.id) into missing from {schema}.batches b where b.id = any(touched) and b.id <> all(locked);
    if missing is not null and wait then
        begin
            locked := locked || array(select b.id from {schema}.batches b where b.id = any(missing) order by b.id
                                      for no key update);
            missing := null;
        exception when lock_not_available then
            null;
        end;
    end if;
    insert into {schema}.batch_recounts (batch_id) select unnest(missing);
    if cardinality(locked) = 0 then
        return;
    end if;
    with sums as materialized (
        select e.batch,
            coalesce(sum(e.jobs) filter (where e.new = 'succeeded'), 0) as succeeded,
            coalesce(sum(e.jobs) filter (where e.new = 'failed'), 0) as failed,
            coalesce(sum(e.jobs) filter (where e.new = 'cancelled'), 0) as cancelled,
            coalesce(sum(e.jobs) filter (where e.new = 'crashed'), 0) as crashed,
            coalesce(sum(e.jobs) filter (where e.new = 'abandoned'), 0) as abandoned,
            coalesce(sum(e.jobs) filter (where e.old = 'succeeded'), 0) as un_succeeded,
            coalesce(sum(e.jobs) filter (where e.old = 'failed'), 0) as un_failed,
            coalesce(sum(e.jobs) filter (where e.old = 'cancelled'), 0) as un_cancelled,
            coalesce(sum(e.jobs) filter (where e.old = 'crashed'), 0) as un_crashed,
            coalesce(sum(e.jobs) filter (where e.old = 'abandoned'), 0) as un_abandoned,
            bool_or(e.old in ('succeeded', 'failed', 'cancelled', 'crashed', 'abandoned')) as is_reopened
        from unnest(touched, olds, news, counts) e(batch, old, new, jobs)
        where e.batch = any(locked)
        group by e.batch
    ), decided as materialized (
        select s.*, case when s.is_reopened then 0
                         else s.failed + s.crashed
                             + case when s.succeeded > 0 then 0 else b.consecutive_failures end
                    end as streak
        from sums s join {schema}.batches b on b.id = s.batch
    )
    update {schema}.batches b set
        succeeded = b.succeeded + d.succeeded - d.un_succeeded, failed = b.failed + d.failed - d.un_failed,
        cancelled = b.cancelled + d.cancelled - d.un_cancelled, crashed = b.crashed + d.crashed - d.un_crashed,
        abandoned = b.abandoned + d.abandoned - d.un_abandoned,
        consecutive_failures = d.streak,
        status = case when d.is_reopened then 'active' when d.streak >= b.failure_threshold then 'aborted'
                      else b.status end
    from decided d where b.id = d.batch;
    perform {schema}.close_batches(locked);
end
$$;

-- Cancels queued jobs of aborted batches; those that run may finish. Locks jobs, skipping what others hold, then batches.
-- Returns rows ended.
create function {schema}.cancel_aborted(max_rows integer) returns integer
language plpgsql volatile as $$
declare
    ended integer;
    counted uuid[];
    olds {schema}.job_status[];
    news {schema}.job_status[];
begin
    with due as materialized (
        select x.* from {schema}.batches b cross join lateral (
            select j.id, j.status, b.consecutive_failures as failures from {schema}.jobs j
            where j.batch_id = b.id and j.status in ('scheduled', 'pending')
            order by j.batch_id desc, j.id desc
            limit max_rows
            for update skip locked
        ) x
        where b.status = 'aborted' and b.completed_at is null
        limit max_rows
    ), noted as (
        insert into {schema}.job_events (job_id, kind, detail)
        select d.id, 'cancel', jsonb_build_object('from_state', d.status, 'to_state', 'cancelled',
            'reason', 'batch_aborted')
        from due d
    ), updated as (
        update {schema}.jobs j set
            status = 'cancelled', epoch = j.epoch + 1, finished_at = clock_timestamp(),
            cancel_requested_at = clock_timestamp(), cancel_phase = 0, error_class = 'BatchAborted',
            error_message = format('the batch was aborted after %s failures in a row', d.failures),
            error_traceback = null, idempotency_freed = j.unique_while_active
        from due d where j.id = d.id
        returning j.batch_id, d.status as old, j.status as new
    )
    select count(*), array_agg(batch_id), array_agg(old), array_agg(new) into ended, counted, olds, news from updated;
    perform {schema}.count_batches(counted, olds, news, false);
    return ended;
end
$$;

-- Compares the counters of unfinished batches with their jobs and repairs what differs: each batch once a minute, or
-- less often where counting takes long, and those in batch_recounts at once. Counters and jobs change in one transaction,
-- so one snapshot of both needs no lock; the difference is added under the lock. Batches of more than 250,000 jobs are only
-- closed, not recounted. Begins no recount after half a second, and never waits for a lock. Returns batches recounted.
create function {schema}.repair_batches(max_batches integer) returns integer
language plpgsql volatile as $$
declare
    due uuid[];
    one uuid;
    drift record;
    entered timestamptz := clock_timestamp();
    begun timestamptz;
    done integer := 0;
begin
    with wanted as materialized (
        select ctid, batch_id from {schema}.batch_recounts limit max_batches for update skip locked
    ), taken as (
        delete from {schema}.batch_recounts r using wanted w where r.ctid = w.ctid
    ), unfinished as materialized (
        select id from {schema}.batches
        where (completed_at is null or (finalizer_job_id is not null and finalized_at is null))
          and count_again_at <= statement_timestamp()
        order by count_again_at
        limit max_batches
    )
    select array_agg(g.id order by g.id) into due
    from (select batch_id as id from wanted union select id from unfinished) g;
    foreach one in array coalesce(due, '{}') loop
        begun := clock_timestamp();
        if begun > entered + interval '0.5 seconds' then
            insert into {schema}.batch_recounts (batch_id) values (one);
            continue;
        end if;
        done := done + 1;
        select c.total, c.succeeded - b.succeeded as succeeded, c.failed - b.failed as failed,
            c.cancelled - b.cancelled as cancelled, c.crashed - b.crashed as crashed,
            c.abandoned - b.abandoned as abandoned
        into drift
        from {schema}.batches b cross join lateral (
            select count(*) as total, count(*) filter (where x.status = 'succeeded') as succeeded,
                count(*) filter (where x.status = 'failed') as failed,
                count(*) filter (where x.status = 'cancelled') as cancelled,
                count(*) filter (where x.status = 'crashed') as crashed,
                count(*) filter (where x.status = 'abandoned') as abandoned
            from (select j.status from {schema}.jobs j where j.batch_id = b.id limit 250001) x
        ) c
        where b.id = one;
        perform from {schema}.batches b where b.id = one for no key update skip locked;
        if not found then
            insert into {schema}.batch_recounts (batch_id) select b.id from {schema}.batches b where b.id = one;
            continue;
        end if;
        update {schema}.batches b set
            total = case when drift.total > 250000 then b.total else drift.total end,
            count_again_at = clock_timestamp()
                + greatest(interval '1 minute', 100 * (clock_timestamp() - begun))
        where b.id = one;
        if drift.total <= 250000 then
            update {schema}.batches b set
                succeeded = b.succeeded + drift.succeeded, failed = b.failed + drift.failed,
                cancelled = b.cancelled + drift.cancelled, crashed = b.crashed + drift.crashed,
                abandoned = b.abandoned + drift.abandoned
            where b.id = one
              and (drift.succeeded, drift.failed, drift.cancelled, drift.crashed, drift.abandoned) <> (0, 0, 0, 0, 0);
        end if;
        perform {schema}.close_batches(array[one]);
    end loop;
    return done;
end
$$;

-- Ends queued jobs whose schedule_to_close has passed. Returns rows ended.
create function {schema}.expire_deadlines(max_rows integer) returns integer
language plpgsql volatile as $$
declare
    ended integer;
    counted uuid[];
    olds {schema}.job_status[];
    news {schema}.job_status[];
begin
    with due as materialized (
        select id, status, epoch, actor from {schema}.jobs
        where schedule_to_close is not null and status in ('scheduled', 'pending')
          and schedule_to_close <= statement_timestamp()
        order by schedule_to_close
        limit max_rows
        for update skip locked
    ), noted as (
        insert into {schema}.job_events (job_id, kind, detail)
        select id, 'state_change', jsonb_build_object('from_state', status, 'to_state', 'failed',
            'reason', 'schedule_to_close')
        from due
    ), untold as (
        insert into {schema}.unseen_ends (job_id, epoch, actor, status)
        select d.id, d.epoch + 1, d.actor, 'failed'
        from due d join {schema}.actor_config c on c.actor = d.actor and c.has_hooks
    ), updated as (
        update {schema}.jobs j set
            status = 'failed', epoch = j.epoch + 1, finished_at = clock_timestamp(),
            error_class = 'DeadlineExceeded', error_message = 'schedule_to_close reached before next dispatch',
            idempotency_freed = j.unique_while_active
        from due d where j.id = d.id
        returning j.batch_id, d.status as old, j.status as new
    )
    select count(*), array_agg(batch_id) filter (where batch_id is not null),
        array_agg(old) filter (where batch_id is not null), array_agg(new) filter (where batch_id is not null)
    into ended, counted, olds, news from updated;
    perform {schema}.count_batches(counted, olds, news, false);
    return ended;
end
$$;

-- Forgets results whose time is over; their size stays, as a sign that there was one. Returns rows changed.
create function {schema}.expire_results(max_rows integer) returns integer
language plpgsql volatile as $$
declare
    expired integer;
begin
    with due as materialized (
        select j.ctid from {schema}.jobs j
        where j.result_expires_at is not null and j.result_expires_at <= statement_timestamp()
        order by j.result_expires_at
        limit max_rows
        for update skip locked
    ), updated as (
        update {schema}.jobs j set result = null, result_expires_at = null from due d where j.ctid = d.ctid returning 1
    )
    select count(*) into expired from updated;
    return expired;
end
$$;

-- Forgets workers that have been silent for a day and hold nothing. Returns rows deleted.
create function {schema}.forget_workers(max_rows integer) returns integer
language plpgsql volatile as $$
declare
    forgotten integer;
begin
    with stale as materialized (
        select w.id from {schema}.workers w
        where w.last_seen_at < clock_timestamp() - interval '1 day'
          and not exists (select from {schema}.jobs j where j.status = 'running' and j.worker_id = w.id)
        limit max_rows
        for update skip locked
    ), deleted as (
        delete from {schema}.workers w using stale s where w.id = s.id returning 1
    )
    select count(*) into forgotten from deleted;
    return forgotten;
end
$$;

-- Records that a schedule could not fire, or that its payload could not be made. `strike` counts it: the third in a row
-- pauses the schedule. A `retry_after` puts its next try off and ends the claim on it; null leaves both alone. Answers
-- whether it was paused. Locks the schedule.
create function {schema}.schedule_failed(
    of_schedule uuid, problem text, noticed_by uuid, strike boolean, retry_after interval
) returns boolean
language plpgsql volatile as $$
declare
    s {schema}.schedules%rowtype;
    pausing boolean;
begin
    select * into s from {schema}.schedules where id = of_schedule and retired_at is null for update;
    if not found then
        return false;
    end if;
    pausing := strike and s.enabled and s.consecutive_failures >= 2;
    insert into {schema}.schedule_decisions (id, schedule_id, version, action, decided_by, as_of, cursor_from, reason)
    values ({schema}.uuid7(), s.id, s.version, case when pausing then 'auto_paused' else 'error' end, noticed_by,
        s.claim_as_of, nullif(s.next_fire_at, '-infinity'), left(problem, 2000));
    update {schema}.schedules set
        last_error = left(problem, 2000), last_error_at = clock_timestamp(), updated_at = clock_timestamp(),
        consecutive_failures = s.consecutive_failures + strike::integer,
        enabled = s.enabled and not pausing,
        disabled_by = case when pausing then 'auto' else s.disabled_by end,
        version = s.version + pausing::integer,
        retry_not_before = case when retry_after is null then s.retry_not_before else clock_timestamp() + retry_after end,
        claim_token = case when retry_after is null and not pausing then s.claim_token end,
        claim_expires_at = case when retry_after is null and not pausing then s.claim_expires_at end
    where id = s.id;
    return pausing;
end
$$;

-- One bounded round of housekeeping. Any number of callers may run it at once: the one that holds the lock works, the
-- others answer {"skipped": true} at once. A pass that fails loses only its own work; its key is absent from the answer
-- and its error is in `maintenance`.
create function {schema}.tick(reap_limit integer default 200) returns jsonb
language plpgsql volatile as $$
declare
    done jsonb := '{}';
    problem text;
    problem_at timestamptz;
begin
    if reap_limit is null or reap_limit not between 1 and 10000 then
        raise exception 'reap_limit = % must be between 1 and 10000', reap_limit using errcode = '22023';
    end if;
    if not pg_try_advisory_xact_lock(hashtextextended('taskq:tick:' || {schema_literal}, 0)) then
        return '{"skipped": true}';
    end if;
    insert into {schema}.maintenance (duty, last_started_at) values ('tick', clock_timestamp())
        on conflict (duty) do update set last_started_at = clock_timestamp();
    begin
        done := done || jsonb_build_object('reaped', {schema}.reap(reap_limit));
    exception when others then
        problem := 'reap: ' || sqlerrm;
    end;
    begin
        done := done || jsonb_build_object('deadline_exceeded', {schema}.expire_deadlines(200));
    exception when others then
        problem := 'expire_deadlines: ' || sqlerrm;
    end;
    begin
        done := done || jsonb_build_object('batch_cancelled', {schema}.cancel_aborted(500));
    exception when others then
        problem := 'cancel_aborted: ' || sqlerrm;
    end;
    begin
        done := done || jsonb_build_object('batches_counted', {schema}.repair_batches(20));
    exception when others then
        problem := 'repair_batches: ' || sqlerrm;
    end;
    begin
        done := done || jsonb_build_object('workers_forgotten', {schema}.forget_workers(200));
    exception when others then
        problem := 'forget_workers: ' || sqlerrm;
    end;
    begin
        done := done || jsonb_build_object('results_expired', {schema}.expire_results(1000));
    exception when others then
        problem := 'expire_results: ' || sqlerrm;
    end;
    begin
        done := done || jsonb_build_object('gates_repaired', {schema}.audit_gates(200));
    exception when others then
        problem := 'audit_gates: ' || sqlerrm;
    end;
    if problem is not null then
        problem_at := clock_timestamp();
    end if;
    update {schema}.maintenance
        set last_finished_at = clock_timestamp(), last_error = problem, last_error_at = problem_at
        where duty = 'tick';
    return done;
end
$$;

-- How many jobs of each of these actors are queued, for those that have a max_pending: the stored one, else `literals`.
-- Until the transaction ends nobody else counts them, so that what is then inserted cannot exceed it; waits for that up
-- to wait_ms, then 55P03. Counts no further than the cap. Serves from actor_config's key and jobs_capped.
create function {schema}.count_capped(actors text[], literals integer[], wait_ms integer)
returns table (name text, queued bigint, cap integer)
language plpgsql volatile set lock_timeout = '5s' as $$
begin
    perform set_config('lock_timeout', wait_ms::text, true);
    perform pg_advisory_xact_lock(k.key) from (
        select distinct hashtextextended('taskq:max_pending:' || {schema_literal} || ':' || g.actor, 0) as key
        from unnest(actors, literals) g(actor, literal) left join {schema}.actor_config c on c.actor = g.actor
        where coalesce(c.max_pending, g.literal) is not null
        order by key
    ) k;
    return query
        select g.actor, (
            select count(*) from (
                select from {schema}.jobs j
                where j.actor = g.actor and j.capped and j.status in ('scheduled', 'pending')
                limit coalesce(c.max_pending, g.literal)
            ) x
        ), coalesce(c.max_pending, g.literal)
        from unnest(actors, literals) g(actor, literal) left join {schema}.actor_config c on c.actor = g.actor
        where coalesce(c.max_pending, g.literal) is not null;
end
$$;

-- The newest job of each actor and identity that was enqueued within the last `windows` seconds and is in one of the
-- statuses that `states` lists. Until the transaction ends nobody else looks for it, so that who finds none may insert
-- one; waits for that up to wait_ms, then 55P03. Serves from jobs_identity.
create function {schema}.unique_holders(
    actors text[], identities text[], windows double precision[], states text[], wait_ms integer
) returns table (ord bigint, id uuid)
language plpgsql volatile set lock_timeout = '5s' as $$
begin
    perform set_config('lock_timeout', wait_ms::text, true);
    perform pg_advisory_xact_lock(k.key) from (
        select distinct hashtextextended(
            format('taskq:unique_for:%s:%s:%s:%s', {schema_literal}, length(g.actor), g.actor, g.identity), 0) as key
        from unnest(actors, identities) g(actor, identity)
        order by key
    ) k;
    return query
        select g.ord, x.id
        from unnest(actors, identities, windows, states) with ordinality g(actor, identity, seconds, states, ord)
        cross join lateral (
            select j.id from {schema}.jobs j
            where j.actor = g.actor and j.identity_key = g.identity
              and j.created_at > clock_timestamp() - make_interval(secs => g.seconds)
              and j.status = any(string_to_array(g.states, ',')::{schema}.job_status[])
            order by j.created_at desc
            limit 1
        ) x;
end
$$;

-- The jobs that fit, null fits all, in one of three orders, those behind a position. Planned for the very values of each
-- call, so that what is null costs nothing and what is given finds its index: jobs_batch, jobs_identity, jobs_tags,
-- jobs_finished, the primary key.
create function {schema}.list_jobs(
    of_queue text, of_statuses {schema}.job_status[], of_actor text, of_identity text, of_batch uuid, of_tags text[],
    in_order text, max_rows integer, after_priority integer, after_time timestamptz, after_id uuid
) returns setof {schema}.jobs
language plpgsql stable set plan_cache_mode = force_custom_plan as $$
begin
    if in_order = 'created' then
        return query
        select j.* from {schema}.jobs j
        where (after_id is null or j.id < after_id)
          and (of_queue is null or j.queue = of_queue)
          and (of_statuses is null or j.status = any(of_statuses))
          and (of_actor is null or j.actor = of_actor)
          and (of_identity is null or j.identity_key = of_identity)
          and (of_batch is null or j.batch_id = of_batch)
          and (of_tags is null or j.tags && of_tags)
        order by j.id desc
        limit max_rows;
    elsif in_order = 'finished' then
        return query
        select j.* from {schema}.jobs j
        where j.status in ('succeeded', 'failed', 'cancelled', 'crashed', 'abandoned')
          and (after_id is null or (j.finished_at, j.id) < (after_time, after_id))
          and (of_queue is null or j.queue = of_queue)
          and (of_statuses is null or j.status = any(of_statuses))
          and (of_actor is null or j.actor = of_actor)
          and (of_identity is null or j.identity_key = of_identity)
          and (of_batch is null or j.batch_id = of_batch)
          and (of_tags is null or j.tags && of_tags)
        order by j.finished_at desc, j.id desc
        limit max_rows;
    else
        return query
        select j.* from {schema}.jobs j
        where (after_id is null or j.priority < after_priority
               or (j.priority = after_priority and (j.scheduled_at, j.id) > (after_time, after_id)))
          and (of_queue is null or j.queue = of_queue)
          and (of_statuses is null or j.status = any(of_statuses))
          and (of_actor is null or j.actor = of_actor)
          and (of_identity is null or j.identity_key = of_identity)
          and (of_batch is null or j.batch_id = of_batch)
          and (of_tags is null or j.tags && of_tags)
        order by j.priority desc, j.scheduled_at, j.id
        limit max_rows;
    end if;
end
$$;

-- Enqueues a job from SQL: psql, triggers, pg_cron, other languages. The retry curve and the queue are what the actor's
-- worker last stored in actor_config. Returns the job's id; with an idempotency key that is taken, the holder's id.
create function {schema}.enqueue(
    actor text,
    payload jsonb,
    queue text default null,
    priority smallint default null,
    scheduled_at timestamptz default null,
    idempotency_key text default null,
    idempotency_scope text default '',
    metadata jsonb default null,
    tags text[] default null
) returns uuid
language plpgsql volatile as $$
declare
    job uuid := {schema}.uuid7();
    holder uuid;
    held_by text;
    queued bigint;
    due timestamptz := coalesce(enqueue.scheduled_at, clock_timestamp());
    home {schema}.actor_config%rowtype;
begin
    if enqueue.actor is null or enqueue.payload is null or enqueue.idempotency_scope is null then
        raise exception 'actor, payload and idempotency_scope must not be null' using errcode = '22004';
    end if;
    if trim(enqueue.actor) = '' or trim(enqueue.idempotency_key) = '' then
        raise exception '% must not be empty', case when trim(enqueue.actor) = '' then 'actor' else 'idempotency_key' end
            using errcode = '22023';
    end if;
    if octet_length(enqueue.idempotency_key) > 1024 or octet_length(enqueue.idempotency_scope) > 1024 then
        raise exception 'idempotency_key and idempotency_scope must be at most 1024 bytes each' using errcode = '22023';
    end if;
    if enqueue.queue !~ '^[A-Za-z_][A-Za-z0-9_.-]{0,199}$' then
        raise exception 'queue = % must be 1 to 200 letters, digits, ''_'', ''.'' or ''-'', starting with a letter or ''_''',
            enqueue.queue using errcode = '22023';
    end if;
    if enqueue.scheduled_at not between '0001-01-01 00:00:00+00' and '9999-12-31 00:00:00+00' then
        raise exception 'scheduled_at = % must be between the years 1 and 9999', enqueue.scheduled_at
            using errcode = '22023';
    end if;
    select * into home from {schema}.actor_config c where c.actor = enqueue.actor;
    for try in 1..3 loop
        if home.max_pending is not null and not exists (
            select from {schema}.jobs j
            where j.idempotency_scope = enqueue.idempotency_scope and j.idempotency_key = enqueue.idempotency_key
              and not j.idempotency_freed
        ) then
            select c.queued into queued from {schema}.count_capped(array[enqueue.actor], '{null}', 5000) c;
            if queued >= home.max_pending then
                raise exception 'actor % has % queued jobs, its max_pending is %', enqueue.actor, queued, home.max_pending
                    using errcode = '53400';
            end if;
        end if;
        insert into {schema}.jobs (id, scheduled_at, status, actor, queue, route, lane, priority, payload, metadata, tags,
            idempotency_scope, idempotency_key, max_attempts, retry_kind, retry_backoff, retry_base, retry_cap,
            retry_jitter, schedule_to_close, capped)
        values (job, due,
            case when due > clock_timestamp() then 'scheduled' else 'pending' end::{schema}.job_status,
            enqueue.actor,
            coalesce(enqueue.queue, home.queue, 'default'), coalesce(enqueue.queue, home.queue, 'default'),
            {schema}.lane_of(enqueue.actor, null, null, coalesce(home.gated, false), false),
            coalesce(enqueue.priority, home.priority, 0), enqueue.payload, enqueue.metadata, enqueue.tags,
            enqueue.idempotency_scope, enqueue.idempotency_key, coalesce(home.max_attempts, 3),
            coalesce(home.retry_kind, 'transient'), coalesce(home.retry_backoff, 'exponential'),
            coalesce(home.retry_base, 5), coalesce(home.retry_cap, 3600), coalesce(home.retry_jitter, 0.2),
            clock_timestamp() + home.time_budget, home.max_pending is not null)
        on conflict do nothing;
        if found then
            perform {schema}.wake();
            return job;
        end if;
        select j.id, j.actor into holder, held_by from {schema}.jobs j
            where j.idempotency_scope = enqueue.idempotency_scope and j.idempotency_key = enqueue.idempotency_key
              and not j.idempotency_freed;
        if held_by is distinct from enqueue.actor and holder is not null then
            raise exception 'idempotency key % is held by a job of actor %', enqueue.idempotency_key, held_by
                using errcode = '23505';
        end if;
        if holder is not null then
            return holder;
        end if;
    end loop;
    raise exception 'idempotency key % is contended', enqueue.idempotency_key using errcode = '40001';
end
$$;
