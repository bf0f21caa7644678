"""What a zygote and the supervisor have agreed on, for the moment when a forked process changes hands."""

from __future__ import annotations

GO = b'{"op":"go"}\n'
"""The first line on a forked child's link: the supervisor knows the child and will notice its end."""

FORK_TIMEOUT = 5.0
"""Seconds until a process that is being forked must have been handed over to the supervisor."""

WARM = b"w"
"""What a spare says on its link when it can be used."""
