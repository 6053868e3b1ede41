"""Draft-model proposer: a second, smaller model of the same vocabulary, with KV on the same pages.

After a step with drafts, or with prompts that are not deferred, it computes what the step committed, the
newest token included: the chunk of a prompt, or the tokens that a window committed. KV of rejected drafts is
overwritten. The newest token's row gives the first draft; each further draft takes a round of one row per
entry.

The model does not run after other steps, so a model without accepted drafts costs almost nothing. `catch_up`
stores the KV of their tokens, and of deferred prompts, before a request gets drafts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from draftproof.errors import ConfigError
from draftproof.models.config import ModelConfig
from draftproof.models.gguf.packed_store import packed_store
from draftproof.models.load import keeps_blocks, load_checkpoint, load_config
from draftproof.models.registry import create_model, expected_tensors, kv_layout
from draftproof.models.runner import Runner
from draftproof.models.weight_formats import WeightTensor
from draftproof.models.weights.update import WeightForms, check_update
from draftproof.models.weights.update_source import WeightSource, read_tensors, target_weights
from draftproof.ops import Rows
from draftproof.ops.contract.kv_layout import resolve_kv_dtype
from draftproof.propose.base import ProposerEnv
from draftproof.propose.draft_rounds import ModelProposer
from draftproof.types import DeviceBatch, Draft, SlotColumns


class DraftModelProposer(ModelProposer):
    """Proposer with a complete model."""

    sources = ("draft_model",)
    depends_on_prompts = True  # one row more for each entry that may be at the end of its prompt
    defers_kv = True

    def __init__(self, env: ProposerEnv, options: Mapping[str, Any]) -> None:
        """Load the model, and refuse one that cannot draft for the target."""
        super().__init__(env, options)
        source, target = self.options["model"], env.target
        if source is None:
            raise ConfigError("method 'draft_model' needs a model: give its name or folder as 'model'")
        assert target is not None
        dtype = str(target.dtype).removeprefix("torch.")
        blocks = keeps_blocks("auto", env.ops.device)
        made = load_checkpoint(source, dtype=dtype, progress=False, keep_blocks=blocks)
        config = made.config
        if config.vocab_size != env.vocab_size:
            raise ConfigError(
                f"{source} cannot draft for this model: its vocabulary has {config.vocab_size} ids, this "
                f"model's {env.vocab_size}. Use a smaller model of the same family"
            )
        if config.max_position < env.max_len:
            raise ConfigError(
                f"{source} has {config.max_position} positions: lower max_model_len ({env.max_len}) to that"
            )
        with packed_store(env.ops, list(made.weights.values())) as store:
            model = create_model(config, made.weights, env.ops, env.max_len, store)
        self.entries = model.entries
        self.runner = Runner(
            model,
            env.ops,
            made.dtype,
            num_pages=env.num_pages,
            page_size=env.page_size,
            max_rows=env.ops.runtime.bucket(env.max_rows) + env.num_slots,
            kv_cache_dtype=env.kv_cache_dtype,
        )
        # [S + 1] first position without KV of the request in each slot, set by its first chunk or by
        # `set_stored`. Padding is written to the last line.
        shape, device = (env.num_slots + 1,), env.ops.device
        self._stored = torch.full(shape, env.max_len, dtype=torch.int64, device=device)
        # [S + 1] whether rows of the prompt are not stored before `catch_up`
        self._defers_prompt = torch.zeros(shape, dtype=torch.bool, device=device)

    @classmethod
    def storage(
        cls,
        options: Mapping[str, Any],
        target: ModelConfig,
        dtype: torch.dtype,
        kv_cache_dtype: str = "auto",
    ) -> tuple[int, int]:
        """Return the bytes of KV per token and of the model's weights."""
        if options.get("model") is None:
            return 0, 0
        config, _ = load_config(options["model"])
        weights = sum(math.prod(shape) for shape in expected_tensors(config).values())
        kv_dtype = resolve_kv_dtype(kv_cache_dtype, dtype)
        return kv_layout(config, kv_dtype).bytes_per_token, weights * dtype.itemsize

    def device_memory(self) -> tuple[Any, Sequence[Tensor]]:
        """Return the model and its caches."""
        return vars(self.runner.model), self.runner.caches

    def check_weights(self, source: WeightSource) -> dict[str, WeightTensor]:
        """Return new weights of the draft model, under the names of its checkpoint."""
        model, dtype = self.runner.model, self.runner.dtype
        tensors = read_tensors(source)
        forms = WeightForms.of_entries(self.entries)
        weights = target_weights(tensors, model.config, dtype, forms.formats, quantize=lambda _: None)
        check_update(forms, weights)
        return weights

    def draft(self, batch: DeviceBatch) -> Draft:
        """Compute what the step committed, then run the rounds."""
        assert batch.spec is not None
        runner, count = self.runner, batch.spec.rounds
        if not batch.spec.runs_model:
            return self.no_draft(batch)
        rows, last = self._committed_rows(batch)
        rounds = self.start_rounds(batch, last)
        hidden, self.num_rounds_run = runner.forward(rows), 0
        for j in range(count):
            if j:
                logits = runner.forward_logits(rounds.rows(j))[0]
            else:
                logits = runner.logits(hidden[last.clamp(min=0)])
            rounds.sample(j, logits)
            self.num_rounds_run = j + 1
            if not rounds.should_continue(j):
                break
        return rounds.draft()

    def set_stored(self, slot: int, count: int | None) -> None:
        self._defers_prompt[slot : slot + 1].fill_(count is not None)
        if count is not None:
            self._stored[slot : slot + 1].fill_(count)

    def catch_up(self, columns: SlotColumns, slots: Tensor, num_rows: int) -> None:
        line = slots.clamp(min=0)
        begin = self._stored[line]
        missing = (columns.computed[line] - begin).clamp(min=0)
        ends = torch.where(slots >= 0, missing, 0).cumsum(0).clamp(max=num_rows)
        count = ends.diff(prepend=ends.new_zeros(1))
        self.runner.forward(self._rows(columns, slots, begin, count, num_rows))
        self._set_stored(slots, begin, count)

    def _committed_rows(self, batch: DeviceBatch) -> tuple[Rows, Tensor]:
        """Return rows of the tokens that the step committed, and the last row [B] of each entry, or -1.

        An entry whose earlier tokens lack KV has no rows.
        """
        columns, chunk, slots = batch.columns, batch.chunk, batch.slots
        assert batch.rows is not None and chunk is not None and batch.spec is not None
        start, line = self._first_positions(batch), slots.clamp(min=0)
        length, computed, stored = columns.length[line], columns.computed[line], self._stored[line]
        end = torch.where(computed == length - 1, length, computed)
        is_prompt = (chunk > 0) & ~self._defers_prompt[line]
        begin = torch.where(is_prompt, start, torch.where(stored < end, stored, start + 1))
        has_rows = (start >= 0) & (is_prompt | ((chunk == 0) & (stored > start)))
        count = torch.where(has_rows, (end - begin).clamp(min=0), 0)
        size = len(batch.rows.tokens) + (len(count) if batch.spec.has_prompts else 0)
        rows = self._rows(columns, slots, begin, count, size)
        self._set_stored(slots, begin, count)
        return rows, torch.where(count > 0, count.cumsum(0) - 1, -1)

    def _first_positions(self, batch: DeviceBatch) -> Tensor:
        """Return the first position [B] that the target computed in the step; -1: none."""
        rows, line = batch.rows, batch.slots.clamp(min=0)
        assert rows is not None
        padding = len(self._stored) - 1
        before = torch.cat([rows.slots.new_full((1,), -1), rows.slots[:-1]])
        first = torch.full((padding + 1,), -1, dtype=torch.int64, device=line.device)
        first[torch.where((rows.slots >= 0) & (rows.slots != before), rows.slots, padding)] = rows.positions
        return torch.where(batch.slots >= 0, first[line], -1)

    def _rows(self, columns: SlotColumns, slots: Tensor, begin: Tensor, count: Tensor, size: int) -> Rows:
        """Return `size` rows: `count` tokens [B] of each slot from position `begin` [B] on, then padding."""
        line, ends = slots.clamp(min=0), count.cumsum(0)
        place = torch.arange(size, device=line.device)
        owner = torch.searchsorted(ends, place, right=True).clamp(max=len(count) - 1)
        real = place < ends[-1]
        slot = torch.where(real, line[owner], 0)
        position = torch.where(real, (begin - ends + count)[owner] + place, 0)
        page_size = self.env.page_size
        page = columns.page_table[slot, position // page_size].long()
        return Rows(
            torch.where(real, columns.tokens[slot, position], 0),
            position,
            torch.where(real, slot, -1),
            torch.where(real, page * page_size + position % page_size, 0),
            columns.page_table,
        )

    def _set_stored(self, slots: Tensor, begin: Tensor, count: Tensor) -> None:
        """Record that the slots [B] have KV of `count` tokens from `begin` on."""
        padding = len(self._stored) - 1
        self._stored[torch.where(count > 0, slots, padding)] = begin + count
