-- Which installation this is, and who may work on it.

-- name: attest
-- $1 the environment, $2 the installation that the caller was configured for, either of them null. Answers the
-- installation; raises TQ422 where it is another one. One row.
select {schema}.attest($1::text, $2::uuid)

-- name: identity
-- The whole row.
select installation_id, environment, version, bound_at, bound_by from {schema}.target_identity

-- name: bind
-- Names the environment $1 of an installation that has none yet, for the reason $2; answers how it stands now. Locks the
-- row.
with here as materialized (
    select environment from {schema}.target_identity for update
), bound as (
    update {schema}.target_identity t set
        environment = $1::text, version = t.version + 1, bound_at = clock_timestamp(), bound_by = session_user
    from here h where h.environment is null
    returning t.environment, t.installation_id
), noted as (
    insert into {schema}.admin_audit (principal, action, target_type, target_id, reason, detail)
    select session_user, 'bind', 'target', b.installation_id::text, $2::text, jsonb_build_object('environment', b.environment)
    from bound b
)
select coalesce(b.environment, h.environment) as environment, b.environment is not null as changed
from here h left join bound b on true

-- name: rotate
-- Makes of a bound installation, which must be $2, another one, of the environment $1, for the reason $3. Answers how it
-- was and what it is now, null where it was not that one or not bound. Locks the row.
with here as materialized (
    select environment, installation_id from {schema}.target_identity for update
), rotated as (
    update {schema}.target_identity t set
        installation_id = {schema}.uuid7(), environment = $1::text, version = t.version + 1,
        bound_at = clock_timestamp(), bound_by = session_user
    from here h where h.environment is not null and h.installation_id = $2::uuid
    returning t.installation_id
), noted as (
    insert into {schema}.admin_audit (principal, action, target_type, target_id, reason, detail)
    select session_user, 'rotate', 'target', r.installation_id::text, $3::text,
        jsonb_build_object('environment', $1::text, 'was', h.environment, 'was_id', h.installation_id)
    from rotated r, here h
)
select h.environment as was, h.installation_id as was_id, r.installation_id
from here h left join rotated r on true
