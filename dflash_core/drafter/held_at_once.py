"""How much the parts of a drafter's run hold at once: constants alone, so that planning memory loads no torch."""

from __future__ import annotations

SCORE_BUDGET_ELEMENTS = 32 << 20
"""Attention scores of one layer (128 MB in fp32); anchors are processed in slices below it."""
WHOLE = 1 << 40
"""More tokens than any transcript has."""
LOGITS_BUDGET_ELEMENTS = 32 << 20
"""Logits that the head holds, some copies of them meanwhile."""
RANKED_ELEMENTS = 2 << 20
"""Logits of missed rows that are ranked together: what a CPU's cache holds."""
ROWS_PER_CALL = 96
"""Rows that a call of the head is filled up to; up to about so many cost little more than one."""
EXTRA_LOGITS_ELEMENTS = 8 << 20
"""Logits of one kind that the extra numbers hold; some copies of them exist meanwhile."""
