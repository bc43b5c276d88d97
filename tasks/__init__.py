"""Prefect tasks: one per costly or outward step, each one call into the core."""
