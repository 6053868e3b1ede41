"""The ops contract: everything that touches the device, and the table of backends.

A backend is one class with these methods. `reference` is the definition (plain loops); every other
backend is tested against it. In exact numerics a row's bits may depend on that row's inputs and on the
weights, never on how many rows are in the call, where the row stands, or what its neighbours hold.

Activations have the model's dtype (fp32 or bf16); sums are accumulated in fp32; logits are fp32.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from typing import Any, ClassVar, TypeVar

import torch as pytorch  # the subpackage `torch` takes that name here once it is imported
from torch import Tensor

from draftproof.errors import ConfigError
from draftproof.ops.contract.draft_rounds import Following
from draftproof.ops.contract.draft_search import DraftSearch
from draftproof.ops.contract.types import Attention as Attention
from draftproof.ops.contract.types import AttentionShape as AttentionShape
from draftproof.ops.contract.types import FusedLayers as FusedLayers
from draftproof.ops.contract.types import KVLayout as KVLayout
from draftproof.ops.contract.types import Layer as Layer
from draftproof.ops.contract.types import Layout as Layout
from draftproof.ops.contract.types import Mlp as Mlp
from draftproof.ops.contract.types import PendingCopy as PendingCopy
from draftproof.ops.contract.types import TokenLogprobs as TokenLogprobs
from draftproof.registry import lookup
from draftproof.types import Choice, Draft, Outcome, PlanColumns, SlotColumns, Windows
from draftproof.types import Rows as Rows

T = TypeVar("T")
Forward = Callable[..., tuple[Tensor, ...]]  # of Rows, and of tensors with as many rows

BACKENDS = {
    "reference": "draftproof.ops.reference.forward:ReferenceOps",
    "torch": "draftproof.ops.torch.forward:TorchOps",
    "cpu": "draftproof.ops.cpu.backend:CpuOps",
    "triton": "draftproof.ops.triton.backend:TritonOps",
}

# Streams keep draws for different purposes independent although seed and position are the same.
STREAM_SAMPLE = 0  # the token at a position; a drafter that samples uses the same noise on purpose
STREAM_ACCEPT = 1  # rejection: keep this draft?
STREAM_RESIDUAL = 2  # rejection: the token in place of a fallen draft
STREAM_SYNTHETIC = 3  # synthetic acceptance, for benchmarks


class Ops(DraftSearch, Following):
    """What a backend provides. Shapes are the contract; `R` rows, `V` vocabulary."""

    name: ClassVar[str]
    default_seqs: ClassVar[int] = 32  # requests that run side by side, unless told otherwise
    default_rows: ClassVar[int] = 512  # rows of a step, unless told otherwise
    asynchronous: ClassVar[bool] = False  # work is queued: the host can run ahead of the device
    fused_rows_limit: ClassVar[int] = 16  # rows up to which one `blocks` costs less than two on fewer of them
    gather_last_layer_from_rows: ClassVar[int] = (
        0  # passes of so many rows and more are told which of them matter; 0: none is
    )

    def __init__(self, device: pytorch.device, numerics: str = "exact") -> None:
        """`numerics`: "fast" lets a backend do what is quickest; one that has nothing quicker stays exact."""
        self.device = device
        self.numerics = numerics

    # --- forward pass -----------------------------------------------------------------------------

    @abstractmethod
    def pack_linear(self, weight: Tensor, bias: Tensor | None = None) -> Any:
        """A weight [N, K] (and bias [N]) in the form that `linear` wants. Opaque to callers."""

    def pack_draft_linear(self, weight: Tensor, bias: Tensor | None = None) -> Any:
        """The same for a weight of what only guesses: `linear` of it may be of fewer bits."""
        return self.pack_linear(weight, bias)

    @abstractmethod
    def linear(self, x: Tensor, packed: Any, out_dtype: pytorch.dtype | None = None) -> Tensor:
        """x [R, K] -> [R, N] in x's dtype or `out_dtype` (fp32 for logits); fp32 accumulation."""

    @abstractmethod
    def embed(self, tokens: Tensor, table: Tensor) -> Tensor:
        """tokens [R] -> rows of table [V, D]: [R, D]."""

    def concat_columns(self, left: Tensor, right: Tensor) -> Tensor:
        """[R, A] and [R, B] -> [R, A + B]."""
        return pytorch.cat([left, right], 1)

    @abstractmethod
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [R, D] / rms(x), rounded to x's dtype, times weight [D]."""

    @abstractmethod
    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(rms_norm(s), s) with s = x + residual rounded to x's dtype; both [R, D]."""

    @abstractmethod
    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """gate_up [R, 2 I] (gate, then up) -> silu(gate) * up [R, I]."""

    @abstractmethod
    def rope_store(
        self,
        qkv: Tensor,  # [R, (num_q + 2 num_kv) * dim]: all q heads, then k, then v
        rows: Rows,
        heads: AttentionShape,
        rope: Tensor,  # [max_len, dim] fp32: cos of the dim/2 frequencies, then sin
        cache: Tensor,  # [2, pages, page_size, num_kv, dim]: K, then V, of this layer; written
        q_norm: Tensor | None,  # [dim] per-head RMS norm before rope, or None
        k_norm: Tensor | None,
        eps: float,
    ) -> Tensor:
        """Norm and rotate q and k (halves convention), store k and v; returns q [R, num_q * dim]."""

    @abstractmethod
    def attention(self, q: Tensor, rows: Rows, heads: AttentionShape, cache: Tensor) -> Tensor:
        """Row at position p attends to the keys 0..p of its slot: [R, num_q * dim]."""

    # Two steps of a block in one: a backend may do them in fewer kernels, with the same bits.

    def linear_rope_store(
        self,
        x: Tensor,  # [R, K]
        packed: Any,  # weight [(num_q + 2 num_kv) * dim, K]
        rows: Rows,
        heads: AttentionShape,
        rope: Tensor,
        cache: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
    ) -> Tensor:
        """`rope_store` of `linear`."""
        qkv = self.linear(x, packed)
        return self.rope_store(qkv, rows, heads, rope, cache, q_norm, k_norm, eps)

    def linear_silu_mul(self, x: Tensor, packed: Any) -> Tensor:
        """`silu_mul` of `linear`: x [R, K], weight [2 I, K] -> [R, I]."""
        return self.silu_mul(self.linear(x, packed))

    def embed_norm_concat(
        self,
        tokens: Tensor,  # [R]
        table: Tensor,  # [V, D]
        token_norm: Tensor,  # [D]
        residual: Tensor,  # [R, D]
        norm: Tensor,  # [D]
        eps: float,
    ) -> Tensor:
        """Return the normed embedding of `tokens` beside the normed `residual`: [R, 2 D]."""
        normed = self.rms_norm(residual, norm, eps)
        return self.concat_columns(self.rms_norm(self.embed(tokens, table), token_norm, eps), normed)

    @property
    def fused_layers(self) -> FusedLayers | None:
        """Return a kernel that runs all layers in one launch with the same bits, or None."""
        return None

    def begin_pass(self, rows: Rows) -> None:
        """A forward pass over these rows begins: what its layers share may be worked out once.

        A hint; an op called without it gives the same.
        """

    def capture(self, forward: Forward, max_rows: int) -> Forward:
        """`forward` in a form that is quick to repeat; calls have at most `max_rows` rows.

        It is called with rows, and maybe with tensors [rows, …] of the same widths each time. The tensors
        that a captured function returns are valid until its next call.
        """
        return forward

    def bucket(self, rows: int) -> int:
        """The number of rows that a step of `rows` is padded to: few sizes are captured, or any goes."""
        return rows

    def graph(self, function: Callable[[], T], apart: bool = False) -> Callable[[], T]:
        """`function` in a form that is quick to repeat: it reads and writes tensors that never move.

        It may be run here, so the caller sees to it that this does no harm. What a graph returns is valid
        until another one runs that was captured with the same `apart`.
        """
        return function

    def run_parallel(self, function: Callable[[], T]) -> Callable[[], T]:
        """`function` may run beside what comes next, until its result is asked for. In a graph alone."""
        result = function()
        return lambda: result

    def compile(self, functions: Sequence[Callable[[], object]], tick: Callable[[int, int], None]) -> None:
        """Make ready what `functions` will need of the backend, if it takes long; they do no harm now.

        `tick`: how much is done, of how much.
        """

    def send(self, source: Tensor, target: Tensor | None = None) -> Tensor:
        """A tensor of the host's on the device, in `target` if given, without waiting for the queue."""
        return source.to(self.device) if target is None else target.copy_(source)

    def fetch(self, tensor: Tensor) -> PendingCopy:
        """A copy on the host of what it holds at this point of the queue."""
        copy = tensor.to("cpu", copy=True)
        return PendingCopy(lambda: copy)

    def seconds(self, function: Callable[[], object], times: int = 5) -> float:
        """How long the device takes for it, as the quickest of a few goes."""
        spent = []
        for _ in range(times):
            begin = time.perf_counter()
            function()
            spent.append(time.perf_counter() - begin)
        return min(spent)

    def free_memory(self) -> int | None:
        """Bytes that can still be allocated on the device; None where nobody can say."""
        return None

    def step_context(self) -> AbstractContextManager[None]:
        """Entered around a step: a backend with threads of its own may quiet torch's here."""
        return nullcontext()

    # --- sampling ---------------------------------------------------------------------------------
    # Noise of (seed, position, stream, id): Philox-4x32-10 with key = (seed low 32, seed high 32) and
    # counter = (id // 4, position, stream, 0); word id % 4 is x; u = (x + 0.5) * 2^-32 in fp64,
    # gumbel = float32(-log(-log1p(-u))). It lies in [-3.2, 22.9].

    @abstractmethod
    def argmax(self, logits: Tensor) -> Tensor:
        """[R, V] -> [R] int64; the lowest id wins a tie. A row with NaN may give anything."""

    @abstractmethod
    def gumbel_argmax(self, scaled: Tensor, seeds: Tensor, positions: Tensor, stream: int) -> Tensor:
        """argmax over ids of fp32(scaled [R, V] + gumbel); seeds, positions [R] int64 -> [R]."""

    @abstractmethod
    def uniform(self, seeds: Tensor, positions: Tensor, stream: int) -> Tensor:
        """u of id 0, as fp64 in (0, 1): [R]."""

    @abstractmethod
    def logsumexp(self, logits: Tensor) -> Tensor:
        """[R, V] fp32 -> [R] fp32; -inf entries count as nothing."""

    @abstractmethod
    def rank(self, logits: Tensor, ids: Tensor) -> Tensor:
        """1 + how many tokens come before ids [R] in the order (value down, id up): [R] int64."""

    @abstractmethod
    def top(self, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The first k of each row in the order (value down, id up): values [R, k], ids [R, k]."""

    @abstractmethod
    def truncate(self, scaled: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
        """Copy of scaled [R, V] with -inf outside top-k, then top-p, then min-p; [R] each.

        In the order (value down, id up): top_k keeps the first k (0 = all); top_p keeps a token while
        the mass before it, renormalised over what top_k kept, is below top_p (1 = all); min_p keeps
        a token whose probability is at least min_p times the best one's (0 = all).
        """

    def process_logits(self, base: Tensor, windows: Windows) -> Tensor:
        """base [L, V] over the temperature, then cut to top-k, top-p and min-p; greedy rows as they are."""
        columns, slot = windows.columns, windows.slot.clamp(min=0)
        hot = (heat := columns.temperature[slot]) > 0
        scaled = base / pytorch.where(hot, heat, 1.0)[:, None]
        top_k = pytorch.where(hot, columns.top_k[slot], 0)
        top_p = pytorch.where(hot, columns.top_p[slot], 1.0)
        return self.truncate(scaled, top_k, top_p, pytorch.where(hot, columns.min_p[slot], 0.0))

    # --- the step's bookkeeping -------------------------------------------------------------------
    # None of these waits for the device, and shapes say nothing about the data: a step of them can be
    # captured. An entry or row with slot -1 is padding: it changes nothing, and nothing is read for it.

    @abstractmethod
    def layout(self, plan: PlanColumns, columns: SlotColumns, page_size: int, out: Layout) -> None:
        """The rows of a step from the slots, ragged, in the order of the plan's entries.

        An entry that has ended has no rows. One with `chunk` computes so many committed tokens from
        `computed` on, one without computes its newest token; then come its drafts, min(plan.drafts,
        num_draft), which an entry with `chunk` has none of. It has a window if its rows reach the newest
        committed token: logits rows of that one and of every draft. Padding rows have slot -1, token,
        position and kv_index 0, draft -1. Rows beyond R or L are not written: the planner saw to that.
        """

    @abstractmethod
    def apply_penalties(self, logits: Tensor, windows: Windows) -> Tensor:
        """A copy of logits [L, V] with penalties, then bias, of each row's slot; LogitAdjust says which.

        With the drafts before the row counted as committed. Repetition looks at prompt and output: a
        token seen has its logit divided by the penalty if positive, multiplied if not. Then frequency
        times the count in the output, then presence, are taken off.
        """

    @abstractmethod
    def apply_bans(self, base: Tensor, windows: Windows) -> None:
        """Write -inf to base [L, V] at banned tokens and at end tokens below min_length.

        The first with LogitAdjust.ALLOWED_IDS, the second with LogitAdjust.MIN_TOKENS.
        """

    @abstractmethod
    def apply_grammar_mask(self, base: Tensor, windows: Windows) -> None:
        """-inf in base [L, V] where a row of a slot with LogitAdjust.MASK is not allowed a token.

        That is in windows.allowed, by the row's slot and depth: bit t % 32 of word t // 32 for token t.
        """

    @abstractmethod
    def sample(self, logits: Tensor, windows: Windows, scaled: bool = False) -> tuple[Tensor, Tensor]:
        """What plain sampling takes at each row of [L, V], and why it cannot: ([L] int64, [L] int64).

        argmax where the temperature is 0, else gumbel_argmax of logits / temperature (of the logits as
        they are if `scaled`) with the slot's seed and the row's position, STREAM_SAMPLE. The second is
        FinishStatus.NO_ALLOWED_TOKEN where all logits are -inf, FinishStatus.NOT_FINITE where one is NaN or
        +inf, else 0. The token is 0 where it cannot, and both are at padding.
        """

    @abstractmethod
    def commit(self, plan: PlanColumns, windows: Windows, choice: Choice, bad: Tensor, out: Outcome) -> None:
        """Judge every window, append what stands to its slot, and say what was done. All of `out` is written.

        Drafts stand up to the first that is not accepted; then comes one token more. What is committed
        ends at the first end token, at max_length, and before the first row with bad [L] > 0, which ends
        the request with that code unless it ended before. `computed` is length - 1 afterwards, num_draft 0.
        An entry with no window has its `computed` moved by its chunk.
        """

    @abstractmethod
    def logprobs(
        self, logits: Tensor, rows: Tensor, tokens: Tensor, top: int, out: TokenLogprobs | None = None
    ) -> TokenLogprobs:
        """Of tokens [N] at logits rows [N] (-1: padding) and of the `top` best there: logit - logsumexp.
        Into the tensors of `out`, if given."""

    @abstractmethod
    def store_drafts(self, columns: SlotColumns, slots: Tensor, budget: Tensor, draft: Draft) -> None:
        """Guesses for slots [B] into their lines: num_draft is the least of count, budget, what max_length
        leaves after one token more, and the tokens before the first outside the vocabulary."""


def resolve_device(name: str) -> pytorch.device:
    """The device by name; "auto" takes a GPU that the kernels can run on, else the CPU."""
    if name == "auto":
        return pytorch.device("cuda" if _gpu_is_able() else "cpu")
    try:
        device = pytorch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"unknown device {name!r}: use 'auto' or 'cpu'") from error
    try:
        pytorch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ConfigError(f"device {name!r} cannot be used here: use 'auto' or 'cpu' ({error})") from error
    return device


def resolve(backend: str, device: pytorch.device, numerics: str = "exact") -> Ops:
    """The backend by name; "auto" takes the quickest that this device can run."""
    if backend == "auto":
        if device.type == "cpu" and find_spec("numba") is not None:
            backend = "cpu"
        elif device.type == "cuda" and _gpu_is_able():
            backend = "triton"
        else:
            backend = "torch"
    options = {} if numerics == "exact" else {"numerics": numerics}
    ops: Ops = lookup(BACKENDS, backend, "backend")(device, **options)
    return ops


def _gpu_is_able() -> bool:
    """Is there a GPU of compute capability 8.0 or newer, and Triton for it?"""
    if not pytorch.cuda.is_available() or find_spec("triton") is None:
        return False
    return pytorch.cuda.get_device_capability() >= (8, 0)
