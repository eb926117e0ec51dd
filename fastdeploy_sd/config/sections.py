"""The frozen configuration values, grouped by who reads them. Each field is declared once, with its text and limits.

A section checks its own fields when constructed; rules between fields are in rules.py, so that tests may construct
unusual combinations on purpose. Knows no YAML, no command line and no model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Literal

from fastdeploy_sd.config.option import Spec, option, verify_fields
from fastdeploy_sd.config.parallel_section import ParallelConfig
from fastdeploy_sd.config.quantization import Activations, QuantizationFormats, read_quantization
from fastdeploy_sd.config.redis_section import RedisConfig
from fastdeploy_sd.config.scheduler_section import SchedulerConfig
from fastdeploy_sd.config.server_section import ServerConfig
from fastdeploy_sd.config.speculative import SpeculativeConfig
from fastdeploy_sd.config.splitwise_section import SplitwiseConfig

DEMO_MODEL = "demo"
_DEMO_MODEL_DIR = Path(__file__).resolve().parents[1] / "demo_model"


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What is served and in which arithmetic."""

    model: str = option(
        MISSING,
        Spec(
            "Checkpoint directory in Hugging Face layout; a GGUF file; the name of a model, as `Qwen/Qwen3-0.6B` or"
            " `Qwen/Qwen3-0.6B-GGUF:Q8_0`, which is fetched unless it is in the cache; or"
            f" '{DEMO_MODEL}' for the bundled model. What is here wins over a name."
        ),
    )
    model_source: Literal["huggingface", "modelscope"] = option(
        "huggingface", Spec("Where a `model` that is a name comes from; `modelscope` needs the package of that name.")
    )
    revision: str | None = option(
        None,
        Spec(
            "Branch, tag or commit of a `model` that is a name; none, or FastDeploy's `master`: the default branch. A"
            " commit in the cache is used without asking the hub."
        ),
    )
    download_dir: str | None = option(
        None,
        Spec("Folder that keeps models fetched by name; none: the hub's own (`HF_HOME`, `MODELSCOPE_CACHE`)."),
    )
    offline: bool = option(
        False, Spec("Fetch nothing: a `model` that is a name must have been fetched before. `HF_HUB_OFFLINE=1` too.")
    )
    served_model_name: tuple[str, ...] | None = option(
        None,
        Spec(
            "Names clients may use in the `model` field, one per flag; the first stands for an unnamed model. None:"
            " the value of `model`."
        ),
    )
    tokenizer: str | None = option(None, Spec("Directory of the tokenizer files; none: the checkpoint's."))
    tokenizer_backend: Literal["auto", "tokenizers", "sentencepiece"] = option(
        "auto",
        Spec(
            "Library that reads the tokenizer: `tokenizers` (tokenizer.json, vocab.json) or `sentencepiece`"
            " (tokenizer.model, sentencepiece.bpe.model). auto: by the first file that the checkpoint has.",
            instead=(("paddlenlp", "auto reads the files of PaddleNLP's Qwen2 and Llama tokenizers"),),
        ),
    )
    reasoning_parser: str | None = option(
        "auto",
        Spec(
            "How the model marks its thinking, which answers return apart: `qwen3` (`<think>`;"
            " also `deepseek_v3`, `glm45`, `kimi_k2`, ...), `deepseek_r1` (the same, and an answer begins inside the"
            " thinking), `ernie_x1` (and `<response>` around the answer), `harmony`, `seed_oss`, `mistral`, `kimi`."
            " auto: as the chat template does; none: everything is the answer."
        ),
    )
    tool_call_parser: str | None = option(
        "auto",
        Spec(
            "How the model writes tool calls: `hermes` (also Qwen and ERNIE), `qwen3_coder`, `llama3_json`,"
            " `deepseek_v3`, `deepseek_v31`, `glm45`, `harmony`, `mistral`, or `json` (bare or in a Markdown fence)."
            " auto: as the chat template does, `hermes` where it does not say, and `json` too where an answer begins"
            " with it; none: requests may offer no functions."
        ),
    )
    generation_config: str = option(
        "auto",
        Spec(
            "Defaults of `temperature`, `top_p`, `top_k`, `min_p`, `repetition_penalty` and `max_tokens`"
            " (`max_new_tokens`) for requests that leave them open. auto: of the checkpoint's generation_config.json;"
            " `vllm`: none, so OpenAI's; or a folder with such a file."
        ),
    )
    dtype: Activations = option(  # noqa: RUF009 (makes a field)
        "bfloat16",
        Spec("Type of weights, activations and, unless `kv_cache_dtype` says otherwise, KV cache. float16: GPUs only."),
    )
    quantization: Literal["none", "wint8", "wint4", "fp8"] | QuantizationFormats | None = option(  # noqa: RUF009 (makes a field)
        None,
        Spec(
            "Quantise the linear layers at load; activations are then int8 per row and group of 128, or with fp8, which"
            " only a GPU multiplies, e4m3. A map says it apart for dense layers, experts and the output head. none: of"
            " `dtype`, even where the checkpoint is quantised.",
            default_text="as the checkpoint is",
            read_map=read_quantization,
        ),
    )
    packed_weights_cache: str | None = option(
        None,
        Spec("Folder that keeps the packed weights, so that the next start maps them; none: pack at every start."),
    )
    max_model_len: int | None = option(
        None, Spec("Longest prompt plus output of a request, in tokens; none: the checkpoint's limit.", minimum=2)
    )
    enforce_eager: bool = option(
        False,
        Spec(
            "Run the model's ops one by one, as its Python calls them, instead of replaying a recording of them in one"
            " native call. The same tokens, more slowly; for debugging."
        ),
    )
    seed: int | None = option(
        None,
        Spec("Seed of requests that name none; none: a random one for each.", minimum=0, maximum=(1 << 63) - 1),
    )

    def __post_init__(self) -> None:
        verify_fields(self, "model")

    @property
    def keeps_integers(self) -> bool:
        """Whether weights that the checkpoint stores as integers stay so."""
        return self.quantization is None

    @property
    def path(self) -> Path:
        """Directory of the checkpoint; 'demo' is the one inside the package. It may not exist."""
        return _DEMO_MODEL_DIR if self.model == DEMO_MODEL else Path(self.model)

    @property
    def packed_weights_folder(self) -> Path | None:
        """Where packed weights are kept; None = nowhere. It may not exist."""
        return None if self.packed_weights_cache is None else Path(self.packed_weights_cache)

    @property
    def tokenizer_path(self) -> Path:
        """Directory of the tokenizer files."""
        return self.path if self.tokenizer is None else Path(self.tokenizer)

    @property
    def served_names(self) -> tuple[str, ...]:
        """The model's names in the API, at least one, each once."""
        return tuple(dict.fromkeys(self.served_model_name or (self.model,)))

    @property
    def served_name(self) -> str:
        """The name in responses to requests that do not name the model."""
        return self.served_names[0]


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The paged KV cache."""

    block_size: int = option(64, Spec("Tokens per KV block.", choices=(16, 32, 64, 128, 256)))
    num_blocks: int | None = option(
        None,
        Spec(
            "KV blocks in all; none: as `kv_cache_memory_gb` allows.",
            name="num_gpu_blocks_override",
            aliases=("num_blocks_override",),
            minimum=1,
        ),
    )
    kv_cache_memory_gb: float | None = option(
        None,
        Spec(
            "Memory for KV blocks, in GiB, of all ranks together, at most what the machine has; none: what"
            " `max_num_seqs` requests of full length need, at most half of what is free when the weights are loaded;"
            " on a GPU what `gpu_memory_utilization` leaves.",
            minimum=0.001,
        ),
    )
    gpu_memory_utilization: float = option(
        0.9,
        Spec(
            "Share of a GPU's memory that may be in use once the server has its weights, its KV blocks and room for its"
            " steps; KV blocks take what is left of it. Without effect on a CPU.",
            minimum=0.01,
            maximum=1,
        ),
    )
    kv_cache_dtype: Literal["auto", "int8", "fp8"] = option(
        "auto",
        Spec(
            "How keys and values are stored: auto is `dtype`; int8 and, on a GPU only, fp8 (e4m3) have one scale per"
            " token and KV head, and about half the bytes of bfloat16. Draft layers alike."
        ),
    )
    enable_prefix_caching: bool = option(True, Spec("Reuse the KV blocks of prompts that start alike."))
    swap_space: float | None = option(
        None,
        Spec(
            "Second level of the prefix cache, in GiB: copies of KV blocks that outlive these. Worth having if it is"
            " larger than the KV cache. none or 0: there is none.",
            minimum=0,
        ),
    )
    swap_folder: str | None = option(
        None,
        Spec(
            "Folder for the file of `swap_space`, which the next start of the same model goes on with; none: it is"
            " memory, and ends with the server."
        ),
    )

    def __post_init__(self) -> None:
        verify_fields(self, "cache")

    @property
    def swap_bytes(self) -> int:
        """Bytes of the second level, 0 = there is none."""
        return int((self.swap_space or 0) * (1 << 30))


@dataclass(frozen=True, slots=True)
class Config:
    """Everything a server or an offline LLM is configured with.

    Attributes:
        num_threads: threads of the kernels.
        device: where the model runs.
        origins: option name -> where its value came from; options that are absent have their default.
    """

    model: ModelConfig
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    speculative: SpeculativeConfig = field(default_factory=SpeculativeConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    splitwise: SplitwiseConfig = field(default_factory=SplitwiseConfig)
    redis: RedisConfig = field(default_factory=RedisConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    num_threads: int | None = option(
        None,
        Spec(
            "Threads of the kernels, of each rank; none: one per core this process may run on, hyperthreads of a core"
            " counting once, and no more than the whole processors of its control group's quota, shared out among the"
            " ranks.",
            minimum=1,
            maximum=1024,
        ),
    )
    device: Literal["auto", "cpu", "gpu"] = option(
        "cpu",
        Spec(
            "Where the model runs. gpu: on the first NVIDIA GPU, by the library that `custom_ops/cuda_build.py --nvcc`"
            " makes; auto: on a GPU where that library, a driver and a GPU are there and no other option needs the"
            " CPU, else cpu."
        ),
    )
    origins: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        verify_fields(self, "")

    @property
    def copies_kv(self) -> bool:
        """Whether KV is copied out of the cache and into it: to other instances or to a second level."""
        return self.splitwise.splitwise_role != "mixed" or self.cache.swap_bytes > 0

    @property
    def engine_timeout_s(self) -> float:
        """Seconds without a sign of life after which an engine hangs; ranks have time to tell which one does."""
        of_ranks_s = 2 * self.parallel.rank_timeout_s if self.parallel.tensor_parallel_size > 1 else 0.0
        return max(self.server.engine_timeout_s, of_ranks_s)


def demo_drafter(name: str) -> Path | None:
    """Return the folder of a bundled drafter for the bundled model, as "demo/eagle3"; None = `name` is none.

    What lies here under that name wins.
    """
    model, _, kind = name.partition("/")
    folder = _DEMO_MODEL_DIR / kind
    is_bundled = model == DEMO_MODEL and kind.isidentifier() and (folder / "config.json").is_file()
    return folder if is_bundled and not Path(name).exists() else None


def drafter_advice(config: Config, method: str) -> str:
    """Return what to do about a drafter of this method, whose drafts are wrong."""
    folder = config.speculative.model
    return (
        f"fewer than one in 20 drafts of {method} is right: {folder} may be read otherwise than it was trained;"
        f" `fastdeploy-sd drafter check {folder} --model {config.model.served_name}` tries other readings"
    )
