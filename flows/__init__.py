"""Prefect flows, one file per deployment, and the command line."""
