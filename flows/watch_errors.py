"""Which errors of an evaluation may pass by themselves: those of machines, not those of checkpoints."""

from __future__ import annotations

import builtins

import httpx

from dflash_core import errors
from dflash_core.errors import CheckpointError, DoesNotFit, PreparationFailed, ResultsError
from flows.watch_values import PassingFault

_OF_MACHINES = (OSError, DoesNotFit, ResultsError, PreparationFailed, PassingFault, httpx.TransportError)
_SERVER_FAULTS = 500
"""HTTP statuses from here on are the server's own trouble."""


def is_passing(error: Exception) -> bool:
    """Tell whether an error is one of a machine that may be well again later, without anybody changing the checkpoint.

    It is away, its disk is full, its memory is taken, somebody holds the results database, nobody prepares the
    target, or Prefect's server does not answer or cannot write.
    """
    if isinstance(error, CheckpointError):
        return False
    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code >= _SERVER_FAULTS
    if isinstance(error, _OF_MACHINES):
        return True
    # What Prefect's client raises where nobody listens at all.
    return isinstance(error, RuntimeError) and "Failed to reach API" in str(error)


def is_passing_kind(name: str) -> bool:
    """Tell the same of an error of which a flow run elsewhere left the name of its type alone."""
    kind = getattr(errors, name, None) or getattr(builtins, name, None)
    return isinstance(kind, type) and issubclass(kind, _OF_MACHINES) and not issubclass(kind, CheckpointError)
