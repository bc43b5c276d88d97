"""What is taken at once where a device had less room than was planned: half, from then on."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from dflash_core.errors import DoesNotFit

_LOG = logging.getLogger(__name__)


@dataclass(slots=True)
class Slices:
    """How many blocks are drafted in one pass: fewer from the first time on that the device had no room for so many."""

    num_anchors: int
    num_halvings: int = 0

    def halve(self, tried: int, error: Exception) -> None:
        """Take half of what was tried from now on.

        Raises:
            DoesNotFit: a single block was too much.
        """
        self.num_anchors = halved(tried, "block", error)
        self.num_halvings += 1


def halved(tried: int, what: str, error: Exception) -> int:
    """Return half of what was tried, say so, and free what the allocator keeps.

    Args:
        tried: how many there was no room for.
        what: what one of them is.
        error: of the device.

    Raises:
        DoesNotFit: a single one was too much.
    """
    if tried <= 1:
        raise DoesNotFit(
            f"the device has no room for a single {what} beside the drafter and the context; "
            "set device: cpu, or free the device"
        ) from error
    left = tried // 2
    _LOG.warning("out of memory with %d %ss at once; going on with %d", tried, what, left)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return left
