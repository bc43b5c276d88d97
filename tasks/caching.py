"""The cache policy of all tasks: a hit counts only while the artifact behind it is whole.

Every cached task takes `store` and `key`. The key is a digest of all data that its product depends on
and of a version constant of the code that makes it, computed by the core.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from prefect.cache_policies import CachePolicy
from prefect.context import TaskRunContext

from dflash_core.config import Config
from dflash_core.store_opening import open_store

SERIALIZER = "json"
"""Records are small manifests; JSON keeps them readable."""


def _artifact_is_whole(kind: str, inputs: dict[str, Any]) -> bool:
    """Ask the task's store; what is whole in the mirror of a remote one is looked for there too."""
    config: Config = inputs.get("config") or Config()
    store = open_store(inputs["store"], config.hosts, mirror=config.store_mirror)
    return store.find(kind, inputs["key"]) is not None


@dataclass
class ArtifactPolicy(CachePolicy):
    """Cache by the artifact's key; compute anew where a record exists but its artifact does not.

    Two runs that want the same artifact do not both make it: the store lets one builder in at a time
    and hands the other what was made.
    """

    kind: str = ""
    is_whole: Callable[[str, dict[str, Any]], bool] = _artifact_is_whole

    def compute_key(
        self, task_ctx: TaskRunContext, inputs: dict[str, Any], flow_parameters: dict[str, Any], **kwargs: Any
    ) -> str | None:
        """Return the record's name, or None to run without a record."""
        key = f"{self.kind}-{inputs['key']}"
        if task_ctx.result_store.exists(key) and not self.is_whole(self.kind, inputs):
            return None
        return key
