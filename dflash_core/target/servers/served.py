"""Which server answers at an address, which protocol it speaks, and whether it serves the target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dflash_core.config import CompletionSettings
from dflash_core.errors import ServerError, ServerMismatch
from dflash_core.target.loading import Target
from dflash_core.target.servers.client import Client

_INFO_PATHS = ("/model_info", "/get_model_info")
"""SGLang's; the second is the older name."""
_APIS_BY_OWNER = {"vllm": "vllm", "sglang": "sglang"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """A server and the model that it is asked for."""

    api: str
    model: str
    """The server's own name of the model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Listed:
    """A model that a server lists."""

    id: str
    names: tuple[str, ...]
    """The id and the path or hub id behind it."""
    owner: str | None


async def find_served(client: Client, settings: CompletionSettings, target: Target) -> Served:
    """Ask a server what it is and what it serves.

    Raises:
        ServerMismatch: it serves another model than the target.
        ServerError: it does not answer, or does not say what it serves.
    """
    listed = _listed((await client.get("/v1/models", may_refuse=True)).data)
    api: str = settings.api
    if api == "auto":
        owners = {model.owner for model in listed if model.owner in _APIS_BY_OWNER}
        api = _APIS_BY_OWNER[owners.pop() or ""] if len(owners) == 1 else "auto"
    info = await _model_info(client) if api in ("auto", "sglang") else None
    if api == "auto":
        api = "openai" if info is None else "sglang"
    if info is not None:
        listed = [*listed, info] if not listed else [_with_names(model, info.names) for model in listed]
    return Served(api=api, model=_choose(listed, settings.server_model, target))


async def _model_info(client: Client) -> _Listed | None:
    for path in _INFO_PATHS:
        data = (await client.get(path, may_refuse=True)).data
        if isinstance(data, Mapping) and isinstance(data.get("model_path"), str):
            served = data.get("served_model_name")
            names = tuple(name for name in (served, data["model_path"]) if isinstance(name, str))
            return _Listed(id=names[0], names=names, owner="sglang")
    return None


def _listed(data: Any) -> list[_Listed]:
    models = data.get("data") if isinstance(data, Mapping) else None
    if not isinstance(models, list):
        return []
    found = [model for model in models if isinstance(model, Mapping) and isinstance(model.get("id"), str)]
    return [
        _Listed(
            id=model["id"],
            names=tuple(name for name in (model["id"], model.get("root")) if isinstance(name, str)),
            owner=model.get("owned_by") if isinstance(model.get("owned_by"), str) else None,
        )
        for model in found
    ]


def _with_names(model: _Listed, names: tuple[str, ...]) -> _Listed:
    return _Listed(id=model.id, names=(*model.names, *names), owner=model.owner)


def _choose(listed: list[_Listed], server_model: str | None, target: Target) -> str:
    """Return the server's name of the target."""
    ids = [model.id for model in listed]
    if server_model is not None:
        if listed and server_model not in ids:
            raise ServerMismatch(
                f"serves {_some(ids)}, not completions.server_model = {server_model!r}; correct one of them"
            )
        return server_model
    if not listed:
        raise ServerError("does not list its models (/v1/models); name the one to ask for in completions.server_model")
    ours = target_names(target)
    for model in listed:
        if ours & {base_name(name) for name in model.names}:
            return model.id
    raise ServerMismatch(
        f"serves {_some(ids)}, target.model is {target.name!r}; serve the target, or, if it is the same model "
        f"under another name, set completions.server_model: {ids[0]}"
    )


def target_names(target: Target) -> set[str]:
    """Return the names that a server may know the target by."""
    names = {base_name(target.name), base_name(target.folder.name)}
    for part in target.folder.parts:
        if part.startswith("models--"):
            # A snapshot in the hub's cache lies in a folder that is named after its commit.
            names.add(base_name(part.replace("--", "/")))
    return names


def base_name(name: str) -> str:
    """Return the last part of a path or hub id, without a revision, in lower case."""
    last = name.rstrip("/").rpartition("/")[2].partition("@")[0]
    return last.removesuffix(".gguf").lower()


def _some(ids: list[str]) -> str:
    more = f" and {len(ids) - 3} more" if len(ids) > 3 else ""
    return ", ".join(repr(name) for name in ids[:3]) + more
