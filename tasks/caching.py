"""The cache policy of all tasks: a hit counts only while the artifact behind it is whole, and still the same.

Every cached task takes `store` and `key`. The key is a digest of all data that its product depends on
and of a version constant of the code that makes it, computed by the core.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from prefect.cache_policies import CachePolicy
from prefect.context import TaskRunContext

from dflash_core.config import Config
from dflash_core.store_opening import open_store

SERIALIZER = "json"
"""Records are small manifests; JSON keeps them readable."""


def _meta_in_store(kind: str, inputs: dict[str, Any]) -> Mapping[str, Any] | None:
    """Ask the task's store; what is whole in the mirror of a remote one is looked for there too."""
    config: Config = inputs.get("config") or Config()
    store = open_store(inputs["store"], config.hosts, mirror=config.store_mirror)
    artifact = store.find(kind, inputs["key"])
    return None if artifact is None else artifact.meta


@dataclass
class ArtifactPolicy(CachePolicy):
    """Cache by the artifact's key; compute anew where a record exists but its artifact does not.

    An artifact that was made again since may say something else than the record: then the record is stale,
    and the task's body reads the artifact. Two runs that want the same artifact do not both make it: the store
    lets one builder in at a time and hands the other what was made.
    """

    kind: str = ""
    find_meta: Callable[[str, dict[str, Any]], Mapping[str, Any] | None] = _meta_in_store
    """Return what the store's artifact says of itself, or None where there is no whole one."""

    def compute_key(
        self, task_ctx: TaskRunContext, inputs: dict[str, Any], flow_parameters: dict[str, Any], **kwargs: Any
    ) -> str | None:
        """Return the record's name, or None to run without a record."""
        key = f"{self.kind}-{inputs['key']}"
        if not task_ctx.result_store.exists(key):
            return key
        meta = self.find_meta(self.kind, inputs)
        return key if meta is not None and _recorded(task_ctx, key) == dict(meta) else None


def _recorded(task_ctx: TaskRunContext, key: str) -> Any:
    """Return the meta data in a record; None where it cannot be read."""
    try:
        return task_ctx.result_store.read(key).result["meta"]
    except Exception:  # cut off, or of another version: whatever is wrong with it, it says nothing
        return None
