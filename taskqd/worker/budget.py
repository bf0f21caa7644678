"""The connections that workers need, as a public function."""

from __future__ import annotations

from taskqd.domain.budget import ConnectionBudget, compute_connection_budget

__all__ = ["ConnectionBudget", "compute_connection_budget"]
