"""`dflash-eval store list` and `store prune`: what the store holds, and making room in it."""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from dflash_core.config import Config, load_config
from dflash_core.errors import InputError, NoResults, ResultsError
from dflash_core.store_listing import CheckpointName, LeftOver, Listing, StoredArtifact, list_store
from dflash_core.store_opening import store_of
from dflash_core.store_pruning import Item, Pruned, PrunePlan, Selection, plan_mirror_pruning, plan_pruning, prune
from dflash_core.store_remote import RemoteStore
from flows import screen

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_BYTES = {"": 1, "B": 1} | {
    f"{letter}{ending}": base**power
    for power, letter in enumerate("KMGT", 1)
    for ending, base in (("B", 1000), ("iB", 1024))
}
_NAMES_SQL = "SELECT run, step, url, identity, weights_sha256 FROM checkpoints"


def list_command(options: argparse.Namespace) -> int:
    """Show what lies in the store."""
    listing = _listing(load_config(options.config))
    if options.json:
        screen.print_json(listing_json(listing))
        return 0
    if not listing.artifacts and not listing.left_overs:
        print(f"{_place(listing)} holds nothing")
        return 0
    screen.print_table(f"Store {_place(listing)}", [_row(one) for one in _all(listing)])
    totals = [
        {"kind": kind, "artifacts": of_kind["number"], "size": _size(of_kind["size_bytes"])}
        for kind, of_kind in _totals(listing).items()
    ]
    screen.print_table(
        "", [*totals, {"kind": "all", "artifacts": len(_all(listing)), "size": _size(listing.size_bytes)}]
    )
    return 0


def prune_command(options: argparse.Namespace) -> int:
    """Remove what is selected, after showing it; 1 where something could not be removed."""
    selection = _selection(options)
    config = load_config(options.config)
    store = store_of(config)
    if options.mirror:
        if not isinstance(store, RemoteStore) or not selection.is_empty:
            raise InputError(
                "--mirror empties the mirror of a store that is not local, without any selection beside it"
            )
        listing, plan = list_store(store.mirror), plan_mirror_pruning(store)
        store = store.mirror
    else:
        listing = _listing(config)
        plan = plan_pruning(listing, selection)
    if not options.json:
        _show_plan(plan, listing, None if options.mirror else selection)
    is_nothing = not plan.artifacts and not plan.left_overs
    if options.dry_run or is_nothing or not _is_confirmed(options, plan):
        if options.json:
            screen.print_json({**plan_json(plan), "removed": [], "in_use": [], "failed": []})
        return 0
    pruned = prune(store, plan)
    if options.json:
        screen.print_json({**plan_json(plan), **_pruned_json(pruned)})
    else:
        _show_pruned(pruned)
    for item, reason in pruned.failed:
        screen.say(f"dflash-eval: {item.path} could not be removed: {reason}")
    return 1 if pruned.failed else 0


def parse_seconds(text: str) -> float:
    """Return a span of time in seconds.

    >>> parse_seconds("30d"), parse_seconds("12h")
    (2592000.0, 43200.0)

    Raises:
        InputError: it is no number with a unit.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhdw])", text.strip())
    if match is None:
        raise InputError(f"--older-than {text!r} is no span of time; write a number and s, m, h, d or w, such as 30d")
    return float(match[1]) * _SECONDS[match[2]]


def parse_bytes(text: str) -> int:
    """Return a size in bytes.

    >>> parse_bytes("50GB"), parse_bytes("1.5GiB"), parse_bytes("0")
    (50000000000, 1610612736, 0)

    Raises:
        InputError: it is no number with a unit.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    unit = None if match is None else next((unit for unit in _BYTES if unit.lower() == match[2].lower()), None)
    if match is None or unit is None:
        raise InputError(f"--keep-bytes {text!r} is no size; write a number and a unit, such as 50GB or 20GiB")
    return int(float(match[1]) * _BYTES[unit])


def _selection(options: argparse.Namespace) -> Selection:
    return Selection(
        kinds=tuple(options.kind or ()),
        older_than_s=None if options.older_than is None else parse_seconds(options.older_than),
        target=options.target,
        run=options.run,
        checkpoint=options.checkpoint,
        keep_bytes=None if options.keep_bytes is None else parse_bytes(options.keep_bytes),
    )


def _listing(config: Config) -> Listing:
    return list_store(store_of(config), _checkpoint_names(config))


def _checkpoint_names(config: Config) -> dict[str, CheckpointName]:
    """Return the checkpoints that the results know, by identity and by digest of the drafter's tensors."""
    from dflash_core.results.query import run_query

    try:
        rows = run_query(config.results, _NAMES_SQL).to_dicts()
    except NoResults:
        return {}
    except ResultsError as error:
        screen.say(f"checkpoints are shown without their names: {error}")
        return {}
    names: dict[str, CheckpointName] = {}
    for row in rows:
        name = CheckpointName(row["run"], row["step"], row["url"])
        names |= {row[key]: name for key in ("identity", "weights_sha256") if row[key]}
    return names


def _is_confirmed(options: argparse.Namespace, plan: PrunePlan) -> bool:
    """Ask, unless told not to.

    Raises:
        InputError: there is nobody to ask.
    """
    if options.yes:
        return True
    if options.json or not sys.stdin.isatty():
        raise InputError("nobody is there to confirm; add --yes to remove, or --dry-run to only look")
    answer = input(f"Remove {len(plan.artifacts) + len(plan.left_overs)} and free {_size(plan.size_bytes)}? [y/N] ")
    if answer.strip().lower() in ("y", "yes"):
        return True
    print("nothing was removed")
    return False


def _show_plan(plan: PrunePlan, listing: Listing, selection: Selection | None) -> None:
    """Show what goes; without a selection, of a mirror."""
    items: list[Item] = [*plan.artifacts, *plan.left_overs]
    rows = [_row(one) for one in items]
    hint = "" if selection is None else _hint(selection, listing)
    if not rows:
        print("nothing to remove" + hint)
        return
    screen.print_table("To be removed", rows)
    cost = "the store keeps all of it" if selection is None else _cost_text(plan)
    print(f"frees {_size(plan.size_bytes)}; {cost}{hint}")


def _hint(selection: Selection, listing: Listing) -> str:
    if selection.is_empty:
        return "; without a selection only what killed builders left goes: see `dflash-eval store prune --help`"
    kinds = sorted({one.kind for one in _all(listing)})
    absent = [kind for kind in selection.kinds if kind not in kinds]
    return f"; there is no {' and no '.join(absent)} here, but {', '.join(kinds) or 'nothing'}" if absent else ""


def _cost_text(plan: PrunePlan) -> str:
    if not plan.artifacts:
        return "no artifact goes, and nothing need be made again"
    parts = []
    if plan.num_without_seconds < len(plan.artifacts):
        parts.append(f"{_span(plan.seconds)} of work")
    if plan.num_without_seconds:
        parts.append(f"an unknown time for {plan.num_without_seconds} of them")
    if plan.bytes_to_read_again:
        parts.append(f"{_size(plan.bytes_to_read_again)} to be read from the checkpoints' hosts")
    return "to make it again costs " + " and ".join(parts)


def _show_pruned(pruned: Pruned) -> None:
    freed = sum(item.size_bytes for item in pruned.removed)
    print(f"removed {len(pruned.removed)}, freed {_size(freed)}")
    if pruned.in_use:
        named = ", ".join(f"{item.kind} {item.key[:8]}" for item in pruned.in_use)
        print(f"left {len(pruned.in_use)} in use: {named}")


def _all(listing: Listing) -> list[Item]:
    return [*listing.artifacts, *listing.left_overs]


def _totals(listing: Listing) -> dict[str, dict[str, int]]:
    totals: dict[str, dict[str, int]] = {}
    for one in _all(listing):
        kind = one.kind if isinstance(one, StoredArtifact) else one.what
        total = totals.setdefault(kind, {"number": 0, "size_bytes": 0})
        total["number"] += 1
        total["size_bytes"] += one.size_bytes
    return totals


def _place(listing: Listing) -> str:
    return listing.url or str(listing.root)


def _row(one: Item) -> dict[str, Any]:
    seconds = one.seconds if isinstance(one, StoredArtifact) else None
    is_mirrored = one.is_mirrored if isinstance(one, StoredArtifact) else None
    mirrored = {} if is_mirrored is None else {"here": "yes" if is_mirrored else "no"}
    return mirrored | {
        "kind": one.kind,
        "key": one.key[:8],
        "belongs to": _belongs_text(one) if isinstance(one, StoredArtifact) else f"({one.what})",
        "size": _size(one.size_bytes),
        "last used": f"{_span(time.time() - one.last_used)} ago",
        "took": None if seconds is None else _span(seconds),
    }


def _belongs_text(one: StoredArtifact) -> str:
    parts = [one.detail, one.target]
    if one.checkpoint is not None:
        name = one.checkpoint
        parts.append(name.url if name.run is None or name.step is None else f"{name.run}, step {name.step}")
    if one.transcripts is not None:
        parts.append(f"transcripts {one.transcripts[:8]}")
    text = ", ".join(part for part in parts if part)
    return f"(damaged) {text}".strip() if one.is_damaged else text or "-"


def listing_json(listing: Listing) -> dict[str, Any]:
    """Return a listing as plain data."""
    return {
        "store": _place(listing),
        "size_bytes": listing.size_bytes,
        "kinds": _totals(listing),
        "artifacts": [_item_json(one) for one in listing.artifacts],
        "left_overs": [_item_json(one) for one in listing.left_overs],
    }


def plan_json(plan: PrunePlan) -> dict[str, Any]:
    """Return what would be removed, and what making it again would cost, as plain data."""
    return {
        "to_remove": _items_json([*plan.artifacts, *plan.left_overs]),
        "size_bytes": plan.size_bytes,
        "recompute": {
            "seconds": plan.seconds,
            "num_without_seconds": plan.num_without_seconds,
            "bytes_to_read": plan.bytes_to_read_again,
        },
    }


def _pruned_json(pruned: Pruned) -> dict[str, Any]:
    return {
        "removed": _items_json(pruned.removed),
        "in_use": _items_json(pruned.in_use),
        "failed": [{**_item_json(item), "error": reason} for item, reason in pruned.failed],
        "removed_locks": pruned.num_locks,
    }


def _items_json(items: Sequence[Item]) -> list[dict[str, Any]]:
    return [_item_json(item) for item in items]


def _item_json(one: Item) -> dict[str, Any]:
    common: dict[str, Any] = {
        "kind": one.kind,
        "key": one.key,
        "path": str(one.path),
        "size_bytes": one.size_bytes,
        "last_used": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(one.last_used)),
        "age_s": round(max(0.0, time.time() - one.last_used), 1),
    }
    if isinstance(one, LeftOver):
        return common | {"what": one.what}
    checkpoint: Mapping[str, Any] | None = None if one.checkpoint is None else one.checkpoint._asdict()
    return common | {
        "is_damaged": one.is_damaged,
        "target": one.target,
        "transcripts": one.transcripts,
        "detail": one.detail,
        "checkpoint": checkpoint,
        **({} if one.is_mirrored is None else {"is_mirrored": one.is_mirrored}),
        "seconds": one.seconds,
        "bytes_read": one.bytes_read,
    }


def _size(num_bytes: int) -> str:
    """Return a size in the unit that suits it (powers of 1000)."""
    amount, unit = float(num_bytes), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if amount < 1000:
            break
        amount, unit = amount / 1000, larger
    return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"


def _span(seconds: float) -> str:
    """Return a span of time in the unit that suits it."""
    for unit in ("d", "h", "m"):
        if seconds >= 2 * _SECONDS[unit]:
            return f"{seconds / _SECONDS[unit]:.0f} {'min' if unit == 'm' else unit}"
    return f"{max(0.0, seconds):.1f} s" if seconds < 10 else f"{seconds:.0f} s"
