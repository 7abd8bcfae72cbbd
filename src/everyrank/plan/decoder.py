"""The sizes of a decoder: from text, by name, or from a Hugging Face config.json. Imports no torch."""

from __future__ import annotations

import dataclasses
import difflib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everyrank.errors import UsageError

__all__ = ["DECODERS", "DecoderSizes", "decoder_from_config", "parse_decoder"]

_MAX_VALUES = {
    "layers": 10_000,
    "hidden": 1_000_000,
    "heads": 100_000,
    "kv": 100_000,
    "ffn": 10_000_000,
    "vocab": 1_000_000_000,
    "seq": 100_000_000,
    "head_dim": 100_000,
}


@dataclass(frozen=True)
class DecoderSizes:
    """A decoder: embedding, `layers` blocks of attention and MLP, a norm and a head.

    kv        heads of keys and values (fewer than `heads` in grouped-query attention)
    ffn       inner width of the MLP; `gated`: it has three matrices (SwiGLU), else two
    seq       tokens of a sample
    head_dim  width of a head
    tied      the head is the embedding
    learned_positions  there is also an embedding of each position

    Raises `UsageError` for invalid sizes.
    """

    layers: int
    hidden: int
    heads: int
    kv: int
    ffn: int
    vocab: int
    seq: int
    gated: bool = True
    head_dim: int = 0
    tied: bool = False
    learned_positions: bool = False

    def __post_init__(self) -> None:
        for name, largest in _MAX_VALUES.items():
            value: object = getattr(self, name)
            if name == "head_dim" and value == 0:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= largest:
                raise UsageError(f"decoder {name}={value!r}: give a whole number from 1 to {largest}")
        if self.head_dim == 0:
            if self.hidden % self.heads:
                raise UsageError(
                    f"decoder hidden={self.hidden},heads={self.heads}: heads do not divide the width; give head_dim="
                )
            object.__setattr__(self, "head_dim", self.hidden // self.heads)
        if self.heads % self.kv:
            raise UsageError(f"decoder heads={self.heads},kv={self.kv}: kv has to divide heads")

    @property
    def block_parameters(self) -> int:
        """Parameters of one block."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv)
        return attention + (3 if self.gated else 2) * self.hidden * self.ffn + 2 * self.hidden

    @property
    def parameters(self) -> int:
        """All parameters."""
        tables = self.vocab * self.hidden * (1 if self.tied else 2)
        return self.layers * self.block_parameters + tables + self.hidden * (self.seq if self.learned_positions else 1)

    @property
    def flops_per_token(self) -> float:
        """Operations of forward and backward for a token: 6 for each parameter in a product, and causal attention."""
        products = self.layers * (self.block_parameters - 2 * self.hidden) + self.vocab * self.hidden
        return 6.0 * products + 6.0 * self.layers * self.seq * self.heads * self.head_dim


DECODERS = {
    "124m": DecoderSizes(12, 768, 12, 12, 3072, 50257, 1024, gated=False, tied=True, learned_positions=True),
    "1b": DecoderSizes(16, 2048, 32, 8, 8192, 128256, 8192, tied=True),
    "3b": DecoderSizes(28, 3072, 24, 8, 8192, 128256, 8192, tied=True),
    "7b": DecoderSizes(32, 4096, 32, 32, 11008, 32000, 4096),
    "8b": DecoderSizes(32, 4096, 32, 8, 14336, 128256, 8192),
    "13b": DecoderSizes(40, 5120, 40, 40, 13824, 32000, 4096),
    "70b": DecoderSizes(80, 8192, 64, 8, 28672, 128256, 8192),
    "405b": DecoderSizes(126, 16384, 128, 8, 53248, 128256, 8192),
}
"""By name: GPT-2 small, Llama 3.2 (1b, 3b), Llama 2 (7b, 13b), Llama 3 (8b, 70b, 405b). Source: their config.json."""


def parse_decoder(text: str) -> DecoderSizes:
    """Return the sizes of `8b`, or `layers=32,hidden=4096,...`; both: `8b,seq=4096`. Raises `UsageError`."""
    parts = [word.strip() for word in text.split(",") if word.strip()]
    if not parts:
        raise UsageError(f"--decoder {text!r}: give a name ({', '.join(DECODERS)}) or layers=32,hidden=4096,heads=32")
    values: dict[str, Any] = {}
    if "=" not in parts[0]:
        name = parts.pop(0).lower()
        if name not in DECODERS:
            close = difflib.get_close_matches(name, DECODERS, 1)
            hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(DECODERS)}"
            raise UsageError(f"--decoder {name}: {hint}")
        values = dataclasses.asdict(DECODERS[name])
        changed = {word.partition("=")[0].strip() for word in parts}
        if changed & {"hidden", "heads"}:
            values["head_dim"] = 0
    kinds = {field.name: field.type for field in dataclasses.fields(DecoderSizes)}
    for word in parts:
        key, equals, value = (piece.strip() for piece in word.partition("="))
        if not equals or key not in kinds:
            close = difflib.get_close_matches(key, kinds, 1)
            hint = f"did you mean {close[0]}=?" if close else f"keys: {', '.join(kinds)}"
            raise UsageError(f"--decoder {word}: {hint}")
        values[key] = _value(key, value, kinds[key] == "bool")
    missing = [key for key in ("layers", "hidden", "heads") if key not in values]
    if missing:
        raise UsageError(f"--decoder {text}: {missing[0]}= is missing; for example layers=32,hidden=4096,heads=32")
    values.setdefault("kv", values["heads"])
    gated = values.setdefault("gated", True)
    values.setdefault("ffn", round(8 * values["hidden"] / 3 / 256 + 0.5) * 256 if gated else 4 * values["hidden"])
    values.setdefault("vocab", 128256)
    values.setdefault("seq", 8192)
    return DecoderSizes(**values)


def _value(key: str, text: str, is_bool: bool) -> int | bool:
    if is_bool:
        if text.lower() not in ("true", "false", "1", "0"):
            raise UsageError(f"--decoder {key}={text}: give true or false")
        return text.lower() in ("true", "1")
    if not text.isdecimal() or len(text) > 12:
        raise UsageError(f"--decoder {key}={text}: give a whole number")
    return int(text)


_MAX_CONFIG_BYTES = 10_000_000  # bytes
# by `model_type` of transformers, where config.json does not have the value
_NOT_GATED = {
    "gpt2", "gpt_bigcode", "gpt_neo", "gptj", "codegen", "gpt_neox", "opt", "bloom", "falcon", "RefinedWeb",
    "RefinedWebModel", "phi", "mpt", "starcoder2", "nemotron", "persimmon", "xglm", "biogpt",
}  # fmt: skip
_TIED = {
    "gpt2", "gpt_bigcode", "gpt_neo", "opt", "bloom", "falcon", "RefinedWeb", "RefinedWebModel", "mpt", "starcoder2",
    "xglm", "biogpt", "cohere", "cohere2", "gemma", "gemma2", "gemma3", "gemma3_text",
}  # fmt: skip
_ENCODERS = {
    "bert", "roberta", "xlm-roberta", "camembert", "distilbert", "electra", "albert", "deberta", "deberta-v2",
    "mpnet", "modernbert", "esm",
}  # fmt: skip
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_OTHER_LAYERS = ("mamba", "ssm_", "linear_num_", "hybrid_override_pattern", "attn_layer_period")


def _group(config: dict[str, Any], name: str) -> dict[str, Any]:
    """Return an object in the config; {} if it is missing."""
    value: object = config.get(name)
    return value if isinstance(value, dict) else {}


def _read_config(path: Path) -> dict[str, Any]:
    """Return the fields of the decoder, which multimodal models have in `text_config`."""
    try:
        if path.stat().st_size > _MAX_CONFIG_BYTES:
            raise UsageError(f"{path}: larger than 10 MB; give the config.json of a model")
        read: object = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{path}: not JSON ({type(error).__name__}); give the config.json of a model") from error
    if not isinstance(read, dict):
        raise UsageError(f"{path}: not a JSON object; give the config.json of a model")
    text = _group(read, "text_config")
    is_tied = {"tie_word_embeddings": read["tie_word_embeddings"]} if "tie_word_embeddings" in read else {}
    return is_tied | text if text else read


def _refuse_others(path: Path, config: dict[str, Any]) -> None:
    """Raise `UsageError` for a model that is not a dense decoder."""
    kind = str(config.get("model_type"))
    experts = [name for name in _EXPERTS if config.get(name) or _group(config, "ffn_config").get(name)]
    if experts:
        raise UsageError(
            f"{path}: {experts[0]} is set: mixtures of experts are not supported here; give a workload with the "
            "model, which plan traces"
        )
    if config.get("is_encoder_decoder"):
        raise UsageError(f"{path}: an encoder with a decoder is not supported here; give a workload instead")
    if kind in _ENCODERS:
        raise UsageError(f"{path}: {kind} is an encoder, which is not supported here; give a workload instead")
    others = [name for name in config if name.startswith(_OTHER_LAYERS) and config[name]]
    if others:
        raise UsageError(
            f"{path}: {others[0]} is set: layers without attention are not supported here; give a workload instead"
        )


def decoder_from_config(path: Path, seq: int | None = None) -> DecoderSizes:
    """Return the sizes in a Hugging Face `config.json` of a dense decoder. Raises `UsageError` for anything else.

    `seq` is the length of a sample; the default is the smaller of `max_position_embeddings` and 8192.
    """
    config = _read_config(path)

    def number(*names: str, default: int | None = None) -> int:
        for name in names:
            value: object = config.get(name)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
        if default is None:
            raise UsageError(
                f"{path}: {names[0]} is missing; give the config.json of a dense decoder, or --decoder layers=..."
            )
        return default

    kind = str(config.get("model_type"))
    _refuse_others(path, config)
    layers = number("num_hidden_layers", "n_layer", "n_layers", "num_layers")
    hidden = number("hidden_size", "n_embd", "d_model")
    heads = number("num_attention_heads", "n_head", "n_heads", "num_heads")
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        kv = 1
    else:
        grouped = _group(config, "attn_config").get("kv_n_heads")
        kv = number("num_key_value_heads", "num_kv_heads", "n_head_kv", default=grouped or heads)
    has_gpt2_names = "n_embd" in config
    gated = not has_gpt2_names and kind not in _NOT_GATED
    ratio: object = config.get("expansion_ratio")
    positions = number("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length", default=8192)
    return DecoderSizes(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv=kv,
        ffn=number(
            "intermediate_size",
            "n_inner",
            "ffn_dim",
            "ffn_hidden_size",
            default=(ratio if isinstance(ratio, int) else 4) * hidden,
        ),
        vocab=number("vocab_size"),
        seq=seq or min(positions, 8192),
        gated=gated,
        head_dim=number("head_dim", default=0),
        tied=bool(config.get("tie_word_embeddings", has_gpt2_names or kind in _TIED)),
        learned_positions=has_gpt2_names and not config.get("rotary_dim"),
    )
