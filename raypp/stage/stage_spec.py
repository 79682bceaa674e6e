"""The specification of a stage: plain data, sent to its actor once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from raypp.config.sections import SpeculativeSection, TransportKind
from raypp.messages import BlockGroup
from raypp.models.draft_head_config import DraftHeadConfig
from raypp.specdec.table_bytes import row_tokens_width

NUM_PADDING_ROWS = 2
"""Rows of the tables that no request owns: one that padding reads, one that it writes; see `StageSpec`."""


@dataclass(frozen=True, kw_only=True)
class GraphSpec:
    """Which steps are padded, captured and replayed."""

    has_full: bool = False  # decode steps
    max_piecewise_tokens: int = 0  # any other step of at most so many tokens, piecewise; 0: none
    has_reports: bool = True  # of log-probabilities, behind decode steps
    is_required: bool = False  # whether a stage without memory for any refuses to start
    planned_bytes: int = 0  # of device memory, that was left to the graphs when the KV cache was sized
    max_bytes: int | None = None  # that they may take before sizes are left out; None: what there is
    compile_backend: str | None = None  # torch.compile gets what is before and after attention; with which compiler
    compile_threads: int = 1  # that compile kernels side by side before anything is captured
    debug_every: int = 0  # replays are checked, and one of so many is compared with its program; 0: neither


@dataclass(frozen=True, kw_only=True)
class DraftHeadSpec:
    """The head on the last stage, and who keeps the hidden states that it wants."""

    model: str | None  # as the user named it; None: it is in the model's own checkpoint
    path: str
    config: DraftHeadConfig
    tap_stages: tuple[int, ...]  # for each of the head's depths, the stage that keeps the states


@dataclass(frozen=True, kw_only=True)
class StageSpec:
    """One stage of the pipeline: its layers, and the sizes that all stages agree on."""

    stage_index: int
    num_stages: int
    rank: int = 0  # of the member of the stage
    num_members: int = 1  # of every stage
    max_steps_per_cohort: int  # in flight; there are as many cohorts as stages
    start_layer: int
    end_layer: int  # exclusive
    model_path: str
    load_format: Literal["auto", "dummy"]
    dtype: str  # a torch dtype's name, of weights and activations
    kv_dtype: str  # of the KV cache
    is_batch_invariant: bool = False  # whether a row has the same bits beside any others
    device: str  # a torch device
    seed: int
    num_threads: int
    max_num_seqs: int  # rows of the tables: one per request that may run, and those for padding
    max_step_rows: int  # rows of one step
    graphs: GraphSpec = GraphSpec()
    max_step_tokens: int  # tokens of one step
    max_model_len: int
    vocab_size: int
    block_size: int
    groups: tuple[BlockGroup, ...]  # layers that keep the same tokens, and their KV blocks
    layer_groups: tuple[int | None, ...]  # of each layer of the stage; None: it keeps no KV
    num_snapshots: int = 0  # of rows' states
    num_cpu_snapshots: int = 0  # that there is room for in CPU memory besides
    num_staged_blocks: int = 1  # that a GPU holds on their way there or back at a time
    max_drafts: int  # K at most; 0 without speculation
    speculative: SpeculativeSection = field(default_factory=SpeculativeSection)
    takes_items: bool = False  # whether prompts may hold images
    items_see_ahead: bool = False  # whether an image's tokens see all of that image
    num_deepstack_layers: int = 0  # leading layers of the model that rows of images are added after
    num_carried_taps: int = 0  # of these, the ones behind the first stage: their rows travel between stages
    layer_input_sizes: tuple[int, ...] = ()
    """Elements of a token behind the residual stream that enter each stage, for its layers and later ones; (): none."""
    ngram_window: int = 0  # newest tokens of a row that n-grams are looked for in; 0 without speculation
    draft_head: DraftHeadSpec | None = None
    transport: TransportKind
    link_timeout_s: float
    trace: bool

    def stream_size(self, stage_index: int, hidden_size: int) -> int:
        """Return the elements of a token that enter a stage's layers; of one behind the last: that leave the last."""
        return hidden_size + sum(self.layer_input_sizes[stage_index : stage_index + 1])

    @property
    def row_tokens_width(self) -> int:
        """Columns of the last stage's table of tokens."""
        return row_tokens_width(self.ngram_window, self.max_drafts)

    @property
    def process_index(self) -> int:
        """Of all members of all stages, those of a stage one after the other."""
        return self.stage_index * self.num_members + self.rank

    @property
    def num_logits(self) -> int:
        """Of a position on one member of the last stage, see `raypp.ops.sample.vocabulary_part`."""
        return -(-self.vocab_size // self.num_members)

    @property
    def is_first(self) -> bool:
        """Whether the stage embeds tokens."""
        return self.stage_index == 0

    @property
    def is_last(self) -> bool:
        """Whether the stage samples."""
        return self.stage_index == self.num_stages - 1

    @property
    def padding_row(self) -> int:
        """The row that padding reads: a sequence of one token in the null block. Nothing ever changes it."""
        return self.max_num_seqs - 2

    @property
    def scrap_row(self) -> int:
        """The row that padding writes. Nobody reads it."""
        return self.max_num_seqs - 1

    @property
    def num_ring_entries(self) -> int:
        """Steps whose host buffers may be in use at a time: those in flight."""
        return self.max_steps_per_cohort * self.num_stages

    @property
    def max_seq_len(self) -> int:
        """The most tokens of a row in a step: drafts may go past the row's end, where nothing reads what they give."""
        return self.max_model_len + self.max_drafts

    @property
    def blocks_per_row(self) -> int:
        """Entries of a row's block table."""
        return -(-self.max_seq_len // self.block_size)

    @property
    def tap_depths(self) -> tuple[int, ...]:
        """Layers of the model after which this stage keeps the hidden states, ascending."""
        return tuple(
            depth for depth in self.carried_depths(self.stage_index) if depth in self._taps_of(self.stage_index)
        )

    def carried_depths(self, sender: int) -> tuple[int, ...]:
        """Return the depths whose hidden states are known to a stage, its own and those before; -1: to none yet."""
        return tuple(sorted({depth for stage in range(sender + 1) for depth in self._taps_of(stage)}))

    def _taps_of(self, stage_index: int) -> set[int]:
        head = self.draft_head
        if head is None:
            return set()
        taps = zip(head.config.aux_depths, head.tap_stages, strict=True)
        return {depth for depth, stage in taps if stage == stage_index}
