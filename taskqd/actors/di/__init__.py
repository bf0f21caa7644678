"""Dependency injection: what actors are given beside their payload."""
