"""Actors: the typed functions that jobs run."""
