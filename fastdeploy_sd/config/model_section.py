"""The options of the model: what is served, how it is read and in which arithmetic."""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Literal

from fastdeploy_sd.config.generation_values import GenerationValues, read_generation_values
from fastdeploy_sd.config.option import Spec, option, verify_fields
from fastdeploy_sd.config.quantization import Activations, QuantizationFormats, read_quantization

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
    chat_template: str | None = option(
        None,
        Spec(
            "File with a chat template (Jinja), or the template itself as text with `{{` or `{%`; none: the"
            " checkpoint's. Formats of thinking and tool calls that are auto follow it."
        ),
    )
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
    override_generation_config: GenerationValues | None = option(  # noqa: RUF009 (makes a field)
        None,
        Spec(
            "Values in place of those that `generation_config` brings, as a map: `temperature`, `top_p`, `top_k`,"
            " `min_p`, `repetition_penalty`, `max_new_tokens`. What a request says still wins.",
            read_map=read_generation_values,
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
    def defaults_source(self) -> tuple[str, Path, GenerationValues | None]:
        """Where defaults of requests come from: the option, the checkpoint, and values in place of theirs."""
        return self.generation_config, self.path, self.override_generation_config

    @property
    def tokenizer_source(self) -> tuple[Path, str, str | None]:
        """Directory, backend and chat template of the tokenizer, in the order in which it is loaded with them."""
        return self.tokenizer_path, self.tokenizer_backend, self.chat_template

    @property
    def served_names(self) -> tuple[str, ...]:
        """The model's names in the API, at least one, each once."""
        return tuple(dict.fromkeys(self.served_model_name or (self.model,)))

    @property
    def served_name(self) -> str:
        """The name in responses to requests that do not name the model."""
        return self.served_names[0]


def demo_drafter(name: str) -> Path | None:
    """Return the folder of a bundled drafter for the bundled model, as "demo/eagle3"; None = `name` is none.

    What lies here under that name wins.
    """
    model, _, kind = name.partition("/")
    folder = _DEMO_MODEL_DIR / kind
    is_bundled = model == DEMO_MODEL and kind.isidentifier() and (folder / "config.json").is_file()
    return folder if is_bundled and not Path(name).exists() else None
