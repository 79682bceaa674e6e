"""The sections of the engine's configuration. Each setting's docstring is its documentation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from raypp.errors import ConfigError

LinkKind = Literal["local", "ipc", "nccl", "gloo", "ray_collective"]
"""How a stage is joined to its neighbours; see `raypp.transport.open`."""

TransportKind = Literal["auto", "local", "ipc", "nccl", "gloo", "ray_collective"]
"""The link that is asked for; `auto` leaves it to where the stages are, see `raypp.transport.link_choice`."""

Placement = Literal["pack", "spread", "strict_pack", "strict_spread"]
"""How stages are placed over the nodes of a cluster; see `raypp.actors.placement`."""


_NGRAM_LADDER = (0, 2, 4, 8)
_HEAD_LADDER = (0, 2, 4)


def _also(**names: str) -> BeforeValidator:
    """Take other engines' names of values, too."""
    return BeforeValidator(lambda value: names.get(value, value) if isinstance(value, str) else value)


class Section(BaseModel):
    """Base of all sections: frozen, strict, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)


class ModelSection(Section):
    """Which model, and how it is held."""

    model: str
    """`tiny` (shipped with raypp), a directory in Hugging Face layout, or a Hugging Face model id."""
    revision: str | None = Field(default=None, min_length=1)
    """Which version of a Hugging Face model: a branch, a tag or a commit. None: its main branch."""
    model_impl: Literal["auto", "raypp", "transformers"] = "auto"
    """Whose layers compute. `raypp`: raypp's own, of the architectures in README's table. `transformers`: transformers'
    modules, with raypp's attention. `auto`: raypp's where it has the architecture, else transformers'."""
    trust_remote_code: bool = False
    """Run the Python code that comes with a checkpoint (`auto_map` in config.json), by transformers' modules. It can do
    whatever raypp's user can. Without it, such code is never run, and a model that needs it is refused."""
    load_format: Literal["auto", "dummy"] = "auto"
    """`dummy` makes random weights from config.json alone."""
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        _also(half="float16", float="float32"),
    ] = "auto"
    """Of weights and activations. `auto` is float32 on a CPU, else the checkpoint's own. `half` is float16, `float`
    float32."""
    quantization: Literal["fp8"] | None = None
    """`fp8` rounds the weights of the layers to float8_e4m3fn while they are read, with a scale per output: half the
    bytes of 16 bits, for a little of the precision. Embedding, LM head, norms and biases stay. None: as the checkpoint
    has them. A checkpoint that is quantized needs no word of it: docs/quantization.md."""
    batch_invariant: bool = False
    """Give a request the same text, bit for bit, whatever runs beside it, at any number of stages, with n-grams or
    without, after a preemption or a death: no sum is cut by the number of rows of a step. For layers of raypp's own on
    GPUs of one kind; prompts are slower: docs/batch_invariance.md."""
    even_routing: bool = False
    """For benchmarks alone: tokens choose their experts by a hash, so that random weights load all experts evenly. The
    text is nonsense."""
    generation_config: Literal["auto", "none"] = "auto"
    """What holds where a request says nothing of temperature, top_p, top_k, min_p, repetition_penalty or max_tokens.
    `auto`: what the model's generation_config.json says of them, for HTTP, batches and the command line, and for `LLM`
    where it is given no `SamplingParams`. `none`: raypp's own defaults."""
    max_model_len: int | None = Field(default=None, ge=2)
    """The most tokens of a request, prompt and output together. None: what the model was made for."""
    rope_scaling: dict[str, Any] | None = None
    """How positions are stretched, in place of config.json's field of that name, in its form. Beyond its 40,960 tokens
    Qwen3 takes up to 131,072 with `{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}`.
    None: as config.json says."""
    seed: int = Field(default=0, ge=0)
    """Of dummy weights and of the seeds drawn for requests that bring none."""
    max_logprobs: int = Field(default=20, ge=-1)
    """The most log-probabilities that a request may ask for per token. -1: any number, up to the whole vocabulary. 0:
    those of its own tokens alone, which no graph reports."""
    skip_tokenizer_init: bool = False
    """Load no tokenizer: prompts are token ids, texts are empty."""
    chat_template: str | None = Field(default=None, min_length=1)
    """A chat template in place of the model's own: a file, or the template itself, in Jinja."""
    tool_call_parser: str = Field(default="auto", min_length=1)
    """How the model writes tool calls, for HTTP and batches: a name of the table in docs/tool_calls.md, or
    `module:attribute` with a `CallSyntax` of your own. `auto`: as its chat template shows, or else its vocabulary.
    `none`: it calls no tools."""
    reasoning_parser: str = Field(default="auto", min_length=1)
    """How the model writes thoughts; as above, your own is a `ThoughtSyntax`. `none`: thoughts are part of answers."""


class CacheSection(Section):
    """The paged KV cache."""

    block_size: int = Field(default=16, ge=1, le=256)
    """Tokens per KV block."""
    num_kv_blocks: int | None = Field(default=None, ge=2)
    """KV blocks per stage. None: what the memory allows, beside the states of running requests where layers have
    recurrent states."""
    kv_cache_dtype: Annotated[Literal["auto", "model", "fp8"], _also(fp8_e4m3="fp8", float8_e4m3fn="fp8")] = "auto"
    """What keys and values are kept as. `model`: as the activations. `fp8`: float8_e4m3fn, divided by the scales of the
    checkpoint where it has some; half the bytes, so twice the tokens and faster steps with many requests, for a little
    of the precision. `auto`: fp8 where config.json has a `kv_cache_scheme` and the device can, else model. `fp8_e4m3`
    and `float8_e4m3fn` are fp8."""
    kv_cache_bytes: int = Field(default=1 << 28, ge=1)
    """Bytes of KV cache per stage on a CPU, or per member of one, where no device says how much memory is there to be
    used."""
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    """The share of a GPU's memory that a stage may use, times the share of the GPU it asked Ray for."""
    enable_prefix_caching: bool = True
    """Reuse the KV of prompt prefixes that were computed before. Where layers have recurrent states, a prefix ends
    where a snapshot of them was kept: at the end of a prompt, and where a prompt went on otherwise than one before."""
    num_state_snapshots: int | None = Field(default=None, ge=0)
    """Snapshots of recurrent states for such prefixes; each takes as much memory as a running request's. 0: no prefix
    is reused. None: a quarter of max_num_seqs. Models without such states need none."""
    cpu_kv_bytes: int = Field(default=0, ge=0)
    """Bytes of main memory per stage, or per member of one, for KV blocks that have to make room in the KV cache: of
    prefixes, and of requests that were preempted. They are copied back where they would be computed again. On GPUs the
    memory is page-locked. All stages keep as many blocks as the one whose blocks are largest has room for. Where layers
    have recurrent states, half of it is for snapshots of them. 0: none."""


class ParallelSection(Section):
    """How the model is cut into stages, and where they run."""

    num_stages: int = Field(default=1, ge=1, le=64)
    """Pipeline stages; each is one Ray actor."""
    layer_partition: list[int] | None = None
    """Layers per stage, in order. None: the partition that makes the slowest stage fastest, LM head included; on GPUs
    that differ, the one with most requests at once per time of the slowest stage."""
    prompt_tokens_per_output: float = Field(default=0.0, ge=0, le=1e5)
    """Prompt tokens that are computed for every token of an answer in the traffic that layers are cut for: prompts make
    layers slower, not the LM head. 0: for steps that only decode. `raypp tune --traffic` reads it off a log."""
    tensor_parallel_size: int = Field(default=1, ge=1, le=64)
    """Members of each stage, on one node: every layer's weights, heads and KV cache are cut for them."""
    enable_expert_parallel: bool | None = None
    """Whether each member has some of the experts, whole, or a part of every expert. None: whole experts where sizes
    of parts, or of their blocks of scales, do not divide; else parts, which load all members alike."""
    transport: TransportKind = "auto"
    """How tensors move between stages. `auto`, for each pair of neighbours: `ipc` on one node when each GPU reaches the
    other's memory, `nccl` between nodes and otherwise, `gloo` on CPUs. One stage is always `local`."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """What stages compute on. `auto`: GPUs when there are any, else CPUs."""
    stage_num_gpus: float = Field(default=1.0, gt=0, le=1)
    """The share of a GPU that a stage asks Ray for, and of its memory that it may use. 0.5 puts two stages on one."""
    placement: Placement = "pack"
    """Which nodes of the cluster the stages run on. `pack`: as few as can be, this node alone if it has room. `spread`:
    as many as can be. `strict_pack`: one node, or refuse. `strict_spread`: a node per stage, or refuse."""
    stage_num_cpus: float = Field(default=0.01, ge=0)
    """CPUs that a stage asks Ray for. Placement only; see `stage_num_threads`."""
    stage_num_threads: int | None = Field(default=None, ge=1)
    """Compute threads of a stage on a CPU. None: the machine's cores but one, which the driver needs, shared out to the
    stages; at least one."""


class SchedulerSection(Section):
    """What a step may hold."""

    max_num_seqs: int = Field(default=256, ge=1)
    """Running requests over all cohorts; a step holds at most ceil(max_num_seqs / num_stages) rows. Where layers have
    recurrent states, fewer if memory lacks room for the states of so many; `num_kv_blocks` keeps the number."""
    max_num_batched_tokens: int = Field(default=2048, ge=1)
    """Tokens that one step may compute."""
    min_prefill_chunk_tokens: int | None = Field(default=None, ge=1)
    """A prompt is not cut into smaller chunks than this, unless the step is full; with several stages a step takes a
    multiple of it. Beside decode rows several stages take what there is time for, in chunks of an eighth of it or
    more. None: 512, and more on GPUs for models with recurrent states, whose prompts the host starts layer by layer."""
    max_steps_per_cohort: int | None = Field(default=None, ge=2, le=4)
    """Decode steps of a cohort that may be in flight at a time; with prompts about, 2. None: 2, but 3 on GPUs where a
    step of the model is so short that the driver's next plan would come late, without speculation."""
    max_itl_ms: float | None = Field(default=None, gt=0)
    """How long a row may wait for its next token because of prompts, milliseconds: steps take no more of these than
    their predicted time allows. Where decode rows alone take longer, prompts get their smallest chunks. None: beside
    decode rows a step takes at most about eight times what its fixed costs are, or twice what these rows take."""
    max_waiting_bytes: int = Field(default=1 << 32, ge=1 << 16)
    """Memory that unfinished requests may take in the driver: 4 bytes per prompt token and 4 KiB per request, images
    apart. A request for which there is no room is refused with QueueFullError."""
    grammar_compile_timeout_s: float = Field(default=20.0, gt=0, le=3600)
    """How long a grammar of `structured_outputs` may take to compile; then its request is refused."""


class SpeculativeSection(Section):
    """Speculative decoding: several drafts verified in one step. The output is the same with and without."""

    method: Literal["ngram", "eagle", "eagle3", "mtp", "auto"] | None = None
    """What proposes drafts. `ngram`: what followed the last occurrence of the row's newest tokens in its own text.
    `eagle`, `eagle3`: a head that was trained for the model, `model` says which. `mtp`: the head in the model's own
    checkpoint (Qwen3.5, Qwen3-Next). `auto`: n-grams where they match, else the head, row by row: that of `model`, or
    the model's own. None: no drafts."""
    model: str | None = None
    """The head of `eagle`, `eagle3` or `auto`: `tiny-eagle3` (shipped with raypp, for `tiny`), a directory, or a
    Hugging Face id. As a flat setting `model` names the engine's own model, so this one is given within its section."""
    head_weights: Literal["auto", "model", "fp8"] = "auto"
    """What a head's weights are read as, the model's LM head included where it has none. `model`: as the model's.
    `fp8`: where a product has up to 64 rows, in 8 bits, kept besides: half the bytes of a draft. Drafts are a little
    worse for it, the text is not: it is the model's.
    `auto`: fp8 on GPUs that have it (compute capability 8.9) with a model in 16 bits."""
    num_speculative_tokens: int | None = Field(default=None, ge=1, le=16)
    """Drafts per row and step, always. None: chosen for each cohort from `draft_ladder`, by how many are accepted."""
    draft_ladder: list[int] | None = Field(default=None, min_length=1)
    """The numbers of drafts to choose from, ascending; at most 16. Every one costs CUDA graphs of its own. None: 0, 2,
    4, 8 for n-grams, 0, 2, 4 for heads."""
    min_n: int = Field(default=2, ge=1, le=15)
    """The shortest run of tokens that counts as an occurrence."""
    max_n: int = Field(default=5, ge=1, le=15)
    """The longest run that is looked for: longer matches go first, among equals the newest."""
    ngram_window: int | None = Field(default=None, ge=64)
    """Newest tokens of a row that are searched; 4 bytes each for every one of max_num_seqs rows, on the last stage.
    None: max_model_len, at most 32,768."""
    free_step_tokens: int | None = Field(default=None, ge=1)
    """Tokens that a step computes for the price of reading the weights that a token is multiplied by, if these are not
    quantized: what `draft_ladder` weighs drafts by. None: 184 on a GPU, 12 on a CPU."""
    forced_acceptance_rate: float | None = Field(default=None, ge=0, le=1)
    """For benchmarks alone: every draft is accepted with this probability, given that all before it were, whatever the
    model says. The text is nonsense."""

    @property
    def uses_head(self) -> bool:
        """Whether a head drafts."""
        return self.method in ("eagle", "eagle3", "mtp", "auto")

    @property
    def ladder(self) -> tuple[int, ...]:
        """The numbers of drafts that a step may have; 0 is always one of them."""
        if self.method is None:
            return (0,)
        if self.num_speculative_tokens is not None:
            return (0, self.num_speculative_tokens)
        given = self.draft_ladder or (_HEAD_LADDER if self.uses_head else _NGRAM_LADDER)
        return (0, *(count for count in given if count))

    @property
    def max_drafts(self) -> int:
        """The most drafts per row and step."""
        return self.ladder[-1]

    @property
    def usual_drafts(self) -> float:
        """Drafts that a row verifies per step, for estimates: of a ladder half of the most."""
        return self.max_drafts if self.num_speculative_tokens is not None else self.max_drafts / 2


class GraphsSection(Section):
    """CUDA graphs."""

    mode: Literal["auto", "full", "piecewise", "full_and_piecewise", "none"] = "auto"
    """`full` captures decode steps, padded to one of a few numbers of rows, and replays them. `piecewise` captures what
    lies between the attention calls of any step, padded to one of a few numbers of tokens. `none` runs every step
    operation by operation. `auto` is `full_and_piecewise` on GPUs and `none` on CPUs, where the others run the same
    padded steps with plain calls."""
    max_piecewise_tokens: int | None = Field(default=None, ge=1)
    """Steps of more tokens run without graphs: by then the device is busy for longer than the host takes to launch, and
    padding would cost more than it saves. None: by the size of the model's layers, 128 to 2,048, or more
    with members, whose hosts take longer. At most max_num_batched_tokens."""
    compile: bool = False
    """Run what is before and after a layer's attention through torch.compile, in graphs and without. Steps of so few
    tokens that raypp's own kernels multiply them stay as they are. It costs a start some seconds, a minute where
    torch's cache (TORCHINDUCTOR_CACHE_DIR) is empty, and on a CPU needs a C++ compiler. Off: no GPU has shown yet what
    it gains."""
    compile_threads: int = Field(default=1, ge=1, le=64)
    """Threads of each stage that compile the kernels of decode steps side by side, before these are captured one after
    the other. It shortens a start with an empty kernel cache. 1: kernels are compiled as captures need them."""
    debug_every: int = Field(default=0, ge=0)
    """Check the addresses at every replay, and compare one of so many replays of each graph, the first among them,
    with what the same operations yield without graphs; a difference ends the engine with an error that names it. Slow.
    0: off. On CPUs nothing is replayed."""


class ImagesSection(Section):
    """Images in prompts, for models that take them."""

    allow_image_urls: bool = False
    """Whether images may be http or https addresses, which the server then fetches. Private addresses never."""
    image_url_timeout_s: float = Field(default=10.0, gt=0, le=600)
    """How long fetching one image may take: look-up, redirections and all. It is one deadline."""
    max_image_fetches: int = Field(default=16, ge=1, le=1024)
    """Images that are fetched at once, on threads of their own; more wait."""
    max_image_bytes: int = Field(default=20 << 20, ge=1)
    """The largest file of an image."""
    max_image_pixels: int = Field(default=64 << 20, ge=1, le=178_956_970)
    """The most pixels of an image, by what its head says: a small file can claim to be a large one. More than can be
    set here Pillow does not open."""
    max_images_per_prompt: int = Field(default=64, ge=1)
    """The most images and frames of one prompt."""
    max_prompt_image_bytes: int = Field(default=1 << 30, ge=1)
    """The most bytes of one prompt's images and frames: of what is handed in, and of the patches made of it, which are
    sent to the engine."""
    max_pixels_in_flight: int = Field(default=256 << 20, ge=1)
    """The most pixels that are decoded at once, over all requests of a process, and the most of one prompt. A prompt
    holds those of all its images, as their heads say, until it is read; others wait."""
    image_wait_timeout_s: float = Field(default=60.0, gt=0, le=3600)
    """How long a prompt may wait for room to decode its images. Over HTTP: until all of them are read."""


class ObservabilitySection(Section):
    """What the engine tells about itself."""

    trace: str | None = None
    """Write a Chrome trace to this file at close: one lane per stage and one for the driver."""

    def check_trace_folder(self) -> None:
        """Refuse a trace in a folder that this machine does not have.

        Raises:
            ConfigError: names the folder.
        """
        folder = None if self.trace is None else Path(self.trace).absolute().parent
        if folder is not None and not folder.is_dir():
            raise ConfigError(
                "the trace cannot be written where it is wanted",
                got=self.trace,
                expected="a file in a folder that exists",
                hint=f"mkdir -p {folder}",
            )


class FaultsSection(Section):
    """How long things may take. Every wait of the engine ends in a named error."""

    start_timeout_s: float = Field(default=600.0, gt=0)
    """From the first look at the cluster to all stages ready: one deadline for all of it. `raypp serve` gives as long
    to the proxies of Ray Serve, before."""
    step_timeout_s: float = Field(default=60.0, gt=0)
    """Steps in flight without progress on any stage: the pipeline counts as frozen."""
    heartbeat_s: float = Field(default=0.5, gt=0, le=10)
    """How often driver, stages and clients send each other a heartbeat where there is nothing else to send. A process
    that is silent for ten heartbeats, and for step_timeout_s, counts as frozen."""
    close_timeout_s: float = Field(default=10.0, gt=0)
    """Orderly shutdown; what is left after that is killed."""
    max_engine_restarts: int = Field(default=3, ge=0, le=1000)
    """How often, within restart_window_s, an engine is started again when a stage, the driver or another node has died.
    When they are used up, running requests end with the error. 0: an engine that dies stays dead."""
    restart_window_s: float = Field(default=600.0, gt=0)
    """Restarts longer ago than this no longer count."""
    restart_wait_s: float = Field(default=60.0, ge=1)
    """How long a restart waits until the cluster has room for the engine, where a node is lost or others took it."""

    @property
    def silence_timeout_s(self) -> float:
        """How long a process of the engine may say nothing, busy or idle, until it counts as frozen. Seconds."""
        return max(self.step_timeout_s, 10 * self.heartbeat_s)


class EncoderSection(Section):
    """The encoders of a model that takes images; without effect on others."""

    num_encoders: int = Field(default=1, ge=0, le=64)
    """Encoder actors, each with the whole encoder. Images are shared out to them by what they cost. 0: the model reads
    text alone, and its vision tower takes no GPU."""
    encoder_num_gpus: float = Field(default=1.0, gt=0, le=1)
    """The share of a GPU that an encoder asks Ray for, and of its memory that it may use (times
    gpu_memory_utilization). With 0.2, and stage_num_gpus = 0.8, an encoder and a stage share one."""
    encoder_num_cpus: float = Field(default=0.01, ge=0)
    """CPUs that an encoder asks Ray for. Placement only; see `encoder_num_threads`."""
    encoder_num_threads: int | None = Field(default=None, ge=1)
    """Compute threads of an encoder on a CPU. None: as many as a stage."""
    token_budgets: list[int] | None = None
    """The sizes, in tokens, that batches of images are padded to; each is a CUDA graph. A larger image is encoded
    without one. None: what the model needs and the memory allows, close enough together that no batch is more than 10 %
    padding."""
    max_images_per_batch: int = Field(default=16, ge=1, le=1024)
    """The most images that are encoded together."""
    encoder_cache_bytes: int = Field(default=1 << 28, ge=0)
    """Embeddings that each encoder keeps, by the images' content: an image that comes again is not encoded again."""
    stage_embedding_bytes: int = Field(default=1 << 28, ge=1)
    """Embeddings that the first stage may hold: those of prompts under way, and of earlier ones while there is room.
    A request whose images need more is refused."""
    max_waiting_pixel_bytes: int = Field(default=1 << 32, ge=1 << 16)
    """Pixels that the driver keeps, those of an image once: of requests that wait and, as these may be preempted, of
    requests that run. A request for which there is no room is refused with QueueFullError."""
    link_embedding_bytes: int = Field(default=1 << 26, ge=1 << 12)
    """Memory of the first stage's GPU through which each encoder writes embeddings; what is larger goes by way of host
    memory."""
    encoder_timeout_s: float = Field(default=120.0, gt=0)
    """How long an encoder may take for one batch of images until it counts as frozen, and is started again."""
    max_encoder_restarts: int = Field(default=10, ge=0)
    """How often an encoder that died is started again; its images are encoded once more. When none is left, the
    engine is started again; if that may not be, requests with images are refused, and text goes on."""
