"""Scenarios as small text tables, and what runs them (`tests.scenarios.runner`)."""
