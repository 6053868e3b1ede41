"""Weights of a running engine and their version.

Version 0 is the checkpoint that was loaded. Every update has a larger number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from draftproof.config import EngineConfig
from draftproof.engine.parallel.sharded_weights import SplitWeights
from draftproof.errors import ConfigError, LoadError
from draftproof.models.config import ModelConfig
from draftproof.models.load import Checkpoint, keeps_blocks, load_checkpoint
from draftproof.models.runner import Runner
from draftproof.models.weight_formats import WeightTensor, quantize_linears
from draftproof.models.weights.update import WeightForms, apply_update, check_update
from draftproof.models.weights.update_source import (
    WeightSource,
    is_path,
    needs_loader,
    read_tensors,
    target_weights,
)
from draftproof.propose.base import Proposer

MAX_VERSION = 2**63 - 1


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """Checked weights of the target and of its proposer."""

    weights: dict[str, WeightTensor]
    draft_weights: dict[str, WeightTensor]
    version: int | None  # None: the next one
    is_complete: bool  # it has every weight of the target


class LiveWeights:
    """Packed weights of the target and the proposer."""

    def __init__(
        self, config: EngineConfig, checkpoint: Checkpoint, runner: Runner, split: SplitWeights | None
    ) -> None:
        """Take the parts of an engine; `split`: of weights that are cut."""
        self.version = 0
        self._config, self._runner, self._split = config, runner, split
        self._model_config, self._dtype = checkpoint.config, checkpoint.dtype
        self._entries = runner.model.entries
        of_entries = WeightForms.of_entries
        self._forms = of_entries(self._entries) if split is None else split.forms(self._entries)
        # a model without files has dummy weights, which are made from its configuration
        self._source = config.model if checkpoint.source is not None else checkpoint.config

    def read(
        self,
        proposer: Proposer | None,
        weights: WeightSource = (),
        draft_weights: WeightSource = (),
        version: int | None = None,
    ) -> WeightUpdate:
        """Read and check new weights without changing anything; LoadError gives the reason of a refusal.

        It may run in any thread, while steps run.
        """
        if version is not None and not self.version < version <= MAX_VERSION:
            raise LoadError(f"version {version} is not above {self.version}, that of the present weights")
        with torch.inference_mode():
            target = self._read_target(weights)
            draft: dict[str, WeightTensor] = {}
            if is_path(draft_weights) or (draft_weights := read_tensors(draft_weights)):
                if proposer is None:
                    raise LoadError("this engine makes no drafts: leave draft_weights out")
                draft = proposer.check_weights(draft_weights)
        if not target and not draft:
            raise LoadError("the update holds no weights")
        return WeightUpdate(target, draft, version, self._forms.formats.keys() <= target.keys())

    def _read_target(self, source: WeightSource) -> dict[str, WeightTensor]:
        config, dtype = self._model_config, self._dtype
        quantization, ops = self._config.quantization, self._runner.ops
        if is_path(source) and needs_loader(Path(str(source))):
            blocks = keeps_blocks(quantization, ops.device)
            made = load_checkpoint(
                str(source), dtype=str(dtype).removeprefix("torch."), progress=False, keep_blocks=blocks
            )
            if _comparable(made.config) != _comparable(config):
                raise LoadError(
                    f"{source} is another model than the one that runs: its configuration differs"
                )
            weights = made.weights
            quantize_linears(weights, quantization, ops)
        else:
            weights = target_weights(
                read_tensors(source),
                config,
                dtype,
                self._forms.formats,
                lambda w: quantize_linears(w, quantization, ops),
            )
        check_update(self._forms, weights)
        return weights

    def apply(self, update: WeightUpdate, proposer: Proposer | None) -> None:
        """Copy new weights into the storage of the old ones. No step may be in flight."""
        if update.version is not None and update.version <= self.version:
            raise LoadError(
                f"version {update.version} is not above {self.version}: another update came first"
            )
        self._copy(update.weights)
        if self._split is not None:
            self._split.finish(update.is_complete)
        if proposer is not None:
            apply_update(proposer.entries, update.draft_weights)
            if rows := self._lm_head_rows(update):
                proposer.refresh_lm_head(rows)
        self.version = self.version + 1 if update.version is None else update.version

    def reload(self) -> None:
        """Read the checkpoint again and copy its weights; ConfigError if they were updated since."""
        if self.version:
            raise ConfigError(
                f"the weights are of version {self.version}, which the checkpoint does not hold: "
                "wake_up(tags=['weights']), update_weights with all of them, wake_up(tags=['kv_cache'])"
            )
        config = self._config
        made = load_checkpoint(
            self._source,
            dtype=str(self._dtype).removeprefix("torch."),
            load_format=config.load_format,
            revision=config.revision,
            seed=config.seed or 0,
            progress=False,
            keep_blocks=keeps_blocks(config.quantization, self._runner.ops.device),
            converts=self._split is None,
        )
        if self._split is not None:  # the other ranks read their own parts
            self._split.reload(self._entries, made, config.quantization, self._runner.ops)
            return
        quantize_linears(made.weights, config.quantization, self._runner.ops)
        apply_update(self._entries, made.weights)

    def _copy(self, weights: Mapping[str, WeightTensor]) -> None:
        if self._split is None:
            apply_update(self._entries, weights)
        else:
            self._split.apply(self._entries, weights)

    def _lm_head_rows(self, update: WeightUpdate) -> Callable[[Tensor], Tensor] | None:
        tied = self._model_config.tie_embeddings
        weight = update.weights.get("model.embed_tokens.weight" if tied else "lm_head.weight")
        if weight is None:
            return None
        return lambda ids: weight.rows(ids).dequantize(self._dtype).to(ids.device)


def _comparable(config: ModelConfig) -> ModelConfig:
    """Return a configuration without what does not change the computation."""
    return replace(config, mtp_source="", dtype="", eos_token_ids=(), bos_token_id=None)
