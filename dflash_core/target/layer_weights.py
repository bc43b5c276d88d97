"""A target whose weights are read part by part: transformers' own model without weights, filled as it is needed.

The model is built on torch's `meta` device, where a tensor has a shape and no memory. Which stored tensors make
which parameter is decided by transformers' own conversion rules (prefixes of nested models, renamed or fused
experts), applied to one decoder layer at a time. Tables are read by rows: of an embedding those of the tokens
that occur, of the head a slice of the vocabulary.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from dflash_core.errors import TargetError
from dflash_core.target.arena import Arena, aligned
from dflash_core.target.bare_model import CannotSplit, Source, build_without_weights, match_sources
from dflash_core.target.loading import Target
from dflash_core.target.runtime import DTYPES, decoder_of
from dflash_core.target.stored_tensors import StoredTensors


@dataclass(slots=True)
class _Rows:
    """The rows of an embedding that were read so far."""

    name: str
    """In the shards."""
    ids: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.long))


class LayerWeights:
    """A target's model with nothing loaded, and the means to load its parts.

    Attributes:
        model: transformers' causal language model; parameters lie on `meta` until they are loaded.
        decoder: its stack of decoder layers.
        layers: the decoder layers themselves.
    """

    def __init__(self, target: Target, compute_dtype: str) -> None:
        """Build the model and match its parameters with the shards.

        Raises:
            CannotSplit: the weights are quantised, or transformers keeps parts in another dtype.
            TargetError: a shard or the config cannot be read.
        """
        self.target = target
        self.dtype = DTYPES[compute_dtype]
        self.stored = StoredTensors(target)
        bare = build_without_weights(target, self.dtype)
        self.model = bare.model
        self.decoder = decoder_of(self.model)
        self.layers: list[nn.Module] = list(self.decoder.layers)
        self._names = {id(module): name for name, module in self.model.named_modules()}
        self._shapes = {name: tuple(tensor.shape) for name, tensor in self.model.state_dict().items()}
        self._sources = match_sources(bare, self.stored, self._shapes)
        self._embeddings: dict[nn.Embedding, _Rows] = {}
        self._arena = Arena()

    @property
    def depth(self) -> int:
        """Return the number of decoder layers."""
        return len(self.layers)

    def layer_names(self, index: int) -> list[str]:
        """Return the names in the shards of everything that one layer is made from."""
        prefix = self._name_of(self.layers[index]) + "."
        sources = {id(source): source for name, source in self._sources.items() if name.startswith(prefix)}
        return [stored for source in sources.values() for _, stored in source.stored]

    def layer_bytes(self, index: int) -> int:
        """Return what one layer takes in the compute dtype."""
        tensors = [*self.layers[index].parameters(), *self.layers[index].buffers()]
        return sum(aligned(tensor.numel() * tensor.dtype.itemsize) for tensor in tensors)

    def conversion_bytes(self, index: int) -> int:
        """Return what converting one layer takes besides: parts, stack and result of its largest fused tensor."""
        prefix = self._name_of(self.layers[index]) + "."
        sizes = [
            2 * sum(self.stored[stored].size_bytes for _, stored in source.stored)
            + math.prod(self._shapes[name]) * self.dtype.itemsize
            for name, source in self._sources.items()
            if name.startswith(prefix) and source.converter is not None
        ]
        return max(sizes, default=0)

    @contextmanager
    def loaded_layer(self, index: int) -> Iterator[nn.Module]:
        """Yield one decoder layer with its weights; they are freed afterwards."""
        layer = self.layers[index]
        self._arena.reserve(max(self.layer_bytes(index) for index in range(self.depth)))
        self._load(layer)
        if index + 1 < self.depth:
            self.stored.will_read(self.layer_names(index + 1))
        try:
            yield layer
        finally:
            layer.to("meta")

    def load_outer(self) -> None:
        """Load what lies beside the layers: final norm, rotary tables and small projections; tables by rows later."""
        inside = {id(module) for layer in self.layers for module in layer.modules()}
        for module in self.decoder.modules():
            if id(module) in inside:
                continue
            self._make_buffers(module)
            if isinstance(module, nn.Embedding):
                self._embeddings[module] = _Rows(name=self._stored_table(module))
                module.register_forward_pre_hook(self._by_row)
            else:
                self._load(module, recurse=False)

    @property
    def num_outer_bytes(self) -> int:
        """Return what `load_outer` takes in the compute dtype, the rows of embeddings not counted."""
        inside = {id(module) for layer in self.layers for module in layer.modules()}
        return sum(
            parameter.numel() * parameter.dtype.itemsize
            for module in self.decoder.modules()
            if id(module) not in inside and not isinstance(module, nn.Embedding)
            for parameter in module.parameters(recurse=False)
        )

    @property
    def embedding_row_bytes(self) -> int:
        """Return what one token's rows of all embedding tables take in the compute dtype."""
        inside = {id(module) for layer in self.layers for module in layer.modules()}
        tables = [one for one in self.decoder.modules() if isinstance(one, nn.Embedding) and id(one) not in inside]
        return sum(table.embedding_dim * self.dtype.itemsize for table in tables)

    def _by_row(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Give an embedding the rows of the tokens that occur, and the places of these tokens among the rows."""
        assert isinstance(module, nn.Embedding)
        ids, rows = inputs[0], self._embeddings[module]
        wanted = torch.unique(ids)
        missing = wanted[~torch.isin(wanted, rows.ids)]
        if missing.numel():
            new = self.stored.gather_rows(rows.name, missing.tolist(), self.dtype)
            joined = torch.cat([rows.ids, missing])
            order = joined.argsort()
            old = module.weight.data if rows.ids.numel() else new[:0]
            module.weight = nn.Parameter(torch.cat([old, new])[order], requires_grad=False)
            rows.ids = joined[order]
        return (torch.searchsorted(rows.ids, ids),)

    def want_rows(self, ids: Sequence[int]) -> None:
        """Read the rows of some tokens of every embedding at once, each once."""
        for module in self._embeddings:
            if module.num_embeddings > max(ids, default=0):
                self._by_row(module, (torch.tensor(sorted(set(ids))),))

    @property
    def head(self) -> nn.Linear:
        """Return the head's module.

        Raises:
            CannotSplit: it is no plain matrix.
        """
        head = self.model.get_output_embeddings()
        if not isinstance(head, nn.Linear):
            raise CannotSplit(f"its head is a {type(head).__name__}")
        return head

    def load_head_slice(self, first: int, last: int) -> None:
        """Give the head its rows `first` up to, not including, `last`: it then computes these logits alone."""
        head = self.head
        self._arena.clear()
        rows = self._arena.empty((last - first, head.in_features), self.dtype)
        self.stored.read_into(rows, self._stored_table(head), first)
        head.weight = nn.Parameter(rows, requires_grad=False)
        if head.bias is not None:
            bias = self._arena.empty((last - first,), self.dtype)
            self.stored.read_into(bias, self._plain_source(f"{self._name_of(head)}.bias"), first)
            head.bias = nn.Parameter(bias, requires_grad=False)

    def free_head(self) -> None:
        """Forget the head's slice."""
        head = self.head
        empty = torch.empty(0, head.in_features, dtype=self.dtype, device="meta")
        head.weight = nn.Parameter(empty, requires_grad=False)

    @property
    def num_head_rows(self) -> int:
        """Return the rows of the head: the vocabulary with its padding."""
        return self.stored[self._stored_table(self.head)].shape[0]

    def _stored_table(self, module: nn.Module) -> str:
        """Return the name in the shards of an embedding or the head; a tied one may lie under the other's name.

        Raises:
            TargetError: there is none.
        """
        name = f"{self._name_of(module)}.weight"
        if name in self._sources:
            return self._plain_source(name)
        tied = dict(getattr(self.model, "all_tied_weights_keys", {}))
        for other, source in [*tied.items(), *((source, other) for other, source in tied.items())]:
            if other == name and source in self._sources:
                return self._plain_source(source)
        raise TargetError(
            f"{self.target.folder} lacks tensors that its config calls for, first {name!r}; copy it again"
        )

    def _plain_source(self, name: str) -> str:
        source = self._sources[name]
        if source.converter is not None:
            raise CannotSplit(f"{name!r} is put together from other tensors")
        ((_, stored),) = source.stored
        if self.stored[stored].shape != self._shapes[name]:
            raise self._mismatch(name, self.stored[stored].shape)
        return stored

    def _load(self, module: nn.Module, *, recurse: bool = True) -> None:
        """Load every parameter and stored buffer of a module.

        Raises:
            TargetError: one is missing or has another shape.
        """
        base = self._name_of(module)
        prefix = f"{base}." if base else ""
        missing = {name for name, _ in module.named_parameters(recurse=recurse)}
        missing |= {name for name in module.state_dict() if recurse or "." not in name}
        for name in sorted(missing):
            source = self._sources.get(prefix + name)
            if source is None:
                continue
            for full, tensor in self._realise(prefix + name, source).items():
                local = full.removeprefix(prefix)
                self._set(module, local, full, tensor)
                missing.discard(local)
        if missing:
            raise TargetError(
                f"{self.target.folder} lacks {len(missing)} tensors that its config calls for, first "
                f"{prefix + min(missing)!r}; copy it again"
            )
        if recurse:
            for child in module.modules():
                self._make_buffers(child)

    def _realise(self, name: str, source: Source) -> dict[str, Tensor]:
        if source.converter is None:
            stored = source.stored[0][1]
            tensor = self._arena.empty(self.stored[stored].shape, self._held_dtype(self.stored[stored].dtype))
            self.stored.read_into(tensor, stored)
            return {name: tensor}
        converter = copy.deepcopy(source.converter)
        for pattern, stored in source.stored:
            # A callable is read when the converter needs it; cast last, so that copies are made of the smaller dtype.
            converter.add_tensor(name, stored, pattern, self._reader(stored))
        made = converter.convert(name, model=self.model, config=self.model.config)
        tensors: dict[str, Tensor] = {}
        for full in list(made):
            value = made.pop(full)
            tensor = value[0] if isinstance(value, list) else value
            tensors[full] = self._arena.empty(tuple(tensor.shape), self._held_dtype(tensor.dtype)).copy_(tensor)
        return tensors

    def _reader(self, stored: str) -> Callable[[], Tensor]:
        return lambda: self.stored.read(stored)

    def _held_dtype(self, stored: torch.dtype) -> torch.dtype:
        return self.dtype if stored.is_floating_point else stored

    def _set(self, module: nn.Module, local: str, full: str, tensor: Tensor) -> None:
        owner_name, _, leaf = local.rpartition(".")
        owner = module.get_submodule(owner_name) if owner_name else module
        if tuple(tensor.shape) != self._shapes.get(full):
            raise self._mismatch(full, tuple(tensor.shape))
        if leaf in owner._parameters:
            parameter = nn.Parameter(tensor, requires_grad=False)
            parameter._is_hf_initialized = True  # type: ignore[attr-defined]  # keeps transformers' init off it
            owner._parameters[leaf] = parameter
        else:
            tensor._is_hf_initialized = True  # type: ignore[attr-defined]
            owner._buffers[leaf] = tensor

    def _mismatch(self, name: str, found: tuple[int, ...]) -> TargetError:
        expected = self._shapes.get(name)
        return TargetError(
            f"{self.target.folder}: tensor {name!r} has the shape {list(found)}, its config calls for "
            f"{None if expected is None else list(expected)}; config and weights belong to different models"
        )

    def _make_buffers(self, module: nn.Module) -> None:
        """Compute the buffers that no shard holds, rotary tables among them, as transformers does after loading."""
        names = [name for name in module._non_persistent_buffers_set if module._buffers.get(name) is not None]
        if not any(module._buffers[name].device.type == "meta" for name in names):  # type: ignore[union-attr]
            return
        for name in names:
            module._buffers[name] = torch.empty_like(module._buffers[name], device="cpu")  # type: ignore[arg-type]
        self.decoder._init_weights(module)

    def _name_of(self, module: nn.Module) -> str:
        return self._names[id(module)]
