"""Identifiers: UUIDv7 everywhere, made by the client."""

from __future__ import annotations

from uuid import UUID

import uuid_utils


def new_uuid() -> UUID:
    """Return a new UUIDv7 (RFC 9562): unique, and sorting by the millisecond it was made in."""
    return UUID(int=uuid_utils.uuid7().int)
