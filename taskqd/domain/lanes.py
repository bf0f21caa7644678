"""Where a job stands inside its queue until it is claimed."""

from __future__ import annotations


def lane_of(actor: str, identity_key: str | None, fairness_key: str | None, gated: bool, round_robin: bool) -> str:
    """Return the lane, as the SQL function of the same name does.

    It is that of the job's identity, else of its actor where that is ``gated`` by a limit, else of its fairness key
    where the queue is ``round_robin``, else the plain lane.
    """
    if identity_key is not None:
        return f"i:{actor}\x1f{identity_key}"
    if gated:
        return f"a:{actor}"
    return f"f:{fairness_key}" if round_robin and fairness_key is not None else ""
