"""causal-lm: trains a language model of Hugging Face's `transformers`, built from a config, on the data of `text`.

`from_transformers` does the same for any config of a causal language model. Nothing is downloaded.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from everyrank.builtin.classify import check_at_least_one, check_dropout
from everyrank.builtin.text import text
from everyrank.errors import CannotRunError, WorkloadError
from everyrank.workload import Workload

__all__ = ["CausalLM", "FromTransformers", "from_transformers", "workload"]

LENGTH = 64
"""Tokens in a sample of `text`."""

FAMILIES = ("llama", "qwen", "gpt2", "mixtral", "qwen-moe")

VOCABULARY_WORDS = {
    "colwise": "colwise",
    "colwise_gather_output": "colwise_gather",
    "colwise_rep": "colwise_gather",
    "embedding_rowwise": "vocabulary",
    "replicate": "replicate",
    "replicated_with_grad_allreduce": "replicate_sum",
    "rowwise": "rowwise",
    "sequence_parallel": "sequence",
}
"""Style of a layer in a plan of `transformers` -> style in `Workload.tensor_plan`."""


class CausalLM(nn.Module):
    """Next-token logits of a model of `transformers`: tokens (B, T) and positions (B, T), integers -> (B, T, V).

    The attention is causal in the order of the tokens as they are given, whatever their positions.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """(B, T), (B, T) -> (B, T, V)."""
        # Without a mask, transformers takes positions that jump for several texts in one row, and masks them from each
        # other. With a mask that hides nothing it does not, and attention stays `is_causal=True`. Both read one number
        # from the device.
        everything = torch.ones_like(tokens, dtype=torch.bool)
        return self.model(input_ids=tokens, position_ids=positions, attention_mask=everything, use_cache=False).logits


@dataclasses.dataclass(frozen=True)
class FromTransformers:
    """What a `Workload` needs of a model: its fields of the same names.

    model        () -> CausalLM, with weights as the model's own initialisation draws them
    blocks       dotted path of its decoder layers
    tensor_plan  its own plan, in the styles of `Workload.tensor_plan`; None without one. Experts are not split
    experts      pattern of the modules with the experts of a mixture; None without experts
    """

    model: Callable[[], nn.Module]
    blocks: str
    tensor_plan: Mapping[str, str] | None
    experts: str | None = None


def from_transformers(config: Any, blocks: str | None = None, tensor: bool = True) -> FromTransformers:
    """The causal language model of a `transformers` config: `Workload(model=parts.model, blocks=parts.blocks, ...)`.

    config   such as `LlamaConfig(...)`. It is not changed
    blocks   dotted path of the repeated blocks, where the model has several lists of them
    tensor   whether to translate its plan; False: `tensor_plan` is None, and tensor-parallel layouts are not possible

    Attention is torch's `scaled_dot_product_attention`. An RMSNorm that computes in float32 whatever it is given
    becomes `nn.RMSNorm` with the same weight, where the two are the same function; so float64 means float64.

    Raises `CannotRunError` without transformers, `WorkloadError` for a config that makes no such model, a model whose
    blocks cannot be found, and a plan that splits a layer in a way that everyrank does not know.
    """
    config = copy.deepcopy(config)
    with torch.device("meta"):
        outline = CausalLM(_build(config))
    if blocks is None:
        blocks = _find_blocks(outline)
    return FromTransformers(
        model=lambda: _with_torch_norms(CausalLM(_build(config))),
        blocks=blocks,
        tensor_plan=_translate(outline) if tensor else None,
        experts=_find_experts(outline),
    )


def _import() -> Any:
    try:
        import transformers
    except ImportError:
        raise CannotRunError("causal-lm needs transformers: pip install 'everyrank[transformers]'") from None
    return transformers


def _build(config: Any) -> Any:
    """Build the model of `transformers` in float32."""
    auto: Any = _import().AutoModelForCausalLM
    try:
        # "eager" computes experts one by one; the other implementations need low precision, or pad
        implementations = {"attn_implementation": "sdpa", "experts_implementation": "eager"}
        return auto.from_config(config, dtype=torch.float32, **implementations)
    except (ValueError, ImportError) as error:  # not a causal model, no sdpa attention, or a missing package
        raise WorkloadError(f"{type(config).__name__}: {str(error).strip().splitlines()[0]}") from error


def _find_blocks(outline: CausalLM) -> str:
    """Return the path of the decoder layers: the module list of the classes in the model's `_no_split_modules`."""
    whole: Any = outline.model._no_split_modules or ()
    paths = [
        name
        for name, module in outline.named_modules()
        if isinstance(module, nn.ModuleList)
        and len(module)
        and all(type(child).__name__ in whole for child in module.children())
    ]
    if len(paths) != 1:
        has = f"has {len(paths)} lists of blocks: {', '.join(paths)}" if paths else "names no list of blocks"
        raise WorkloadError(f"{type(outline.model).__name__} {has}; give from_transformers(config, blocks=...) one")
    return paths[0]


def _is_experts(module: nn.Module) -> bool:
    """Whether `transformers` calls this module with (tokens, chosen experts, weights), with stacked parameters."""
    count = getattr(module, "num_experts", None)
    parameters = list(module.parameters())
    is_stacked = any(tensor.dim() == 3 for tensor in parameters) and {tensor.shape[0] for tensor in parameters} == {
        count
    }
    return is_stacked and "top_k_index" in inspect.signature(module.forward).parameters


def _find_experts(outline: CausalLM) -> str | None:
    """Return the pattern of the experts' modules, or None."""
    names = [name for name, module in outline.named_modules() if _is_experts(module)]
    patterns = list(dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in names))
    return patterns[0] if len(patterns) == 1 else None


def _translate(outline: CausalLM) -> dict[str, str] | None:
    """Translate the model's tensor-parallel plan into `Workload.tensor_plan`; None without one."""
    model: Any = outline.model
    experts = tuple(name + "." for name, module in model.named_modules() if _is_experts(module))
    names = [name for name, _ in [*model.named_modules(), *model.named_parameters()]]
    names = [name for name in names if not f"{name}.".startswith(experts)]
    plan: dict[str, str] = {}
    for pattern, word in (model.tp_plan or {}).items():
        expression = re.escape(pattern).replace(r"\*", r"\d+")
        if not any(re.fullmatch(expression, name) for name in names):
            continue
        if word not in VOCABULARY_WORDS:
            raise WorkloadError(
                f"{type(model).__name__} splits {pattern} {word!r}, which everyrank does not support; "
                "from_transformers(config, tensor=False) trains it under all other layouts"
            )
        plan[f"model.{pattern}"] = VOCABULARY_WORDS[word]
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is not None and head.weight is embedding.weight:
        styles = {embedding: "vocabulary", head: "colwise_gather"}
        ends = {name: styles[module] for name, module in outline.named_modules() if module in styles}
        if plan.keys() & ends.keys():  # one weight: split alike, or not at all
            plan |= ends
    return plan or None


def _with_torch_norms(model: CausalLM) -> CausalLM:
    """The model with torch's RMSNorm, where that is the same function.

    Rounding to float32 turns a difference of 1e-16 between two layouts into one of 1e-7 now and then.
    """
    for parent in list(model.modules()):
        for name, norm in list(parent.named_children()):
            eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
            weight: Any = getattr(norm, "weight", None)
            if not type(norm).__name__.endswith("RMSNorm") or eps is None or weight is None or weight.dim() != 1:
                continue
            ours = nn.RMSNorm(weight.numel(), eps=eps)
            ours.weight = weight
            probe = torch.linspace(-1.0, 2.0, weight.numel())
            with torch.no_grad():
                if torch.allclose(norm(probe), ours(probe), rtol=1e-5, atol=1e-6):  # Gemma's multiplies by 1 + weight
                    setattr(parent, name, ours)
    return model


def _config(family: str, num_blocks: int, width: int, heads: int, tied: bool, dropout: float) -> Any:
    """Return a small config of a model family; `dropout` applies to all its dropout settings."""
    transformers = _import()
    if family == "gpt2":
        return transformers.GPT2Config(
            vocab_size=256,
            n_positions=LENGTH,
            n_embd=width,
            n_layer=num_blocks,
            n_head=heads,
            resid_pdrop=dropout,
            embd_pdrop=dropout,
            attn_pdrop=dropout,
            bos_token_id=None,
            eos_token_id=None,
            tie_word_embeddings=tied,
        )
    shape: dict[str, Any] = {
        "vocab_size": 256,
        "max_position_embeddings": LENGTH,
        "hidden_size": width,
        "intermediate_size": 3 * width,
        "num_hidden_layers": num_blocks,
        "num_attention_heads": heads,
        "attention_dropout": dropout,
        "bos_token_id": None,
        "eos_token_id": None,
        "tie_word_embeddings": tied,
    }
    if family == "llama":
        return transformers.LlamaConfig(**shape)
    if family == "mixtral":
        return transformers.MixtralConfig(**shape, num_key_value_heads=heads, num_local_experts=4)
    # two heads of queries share one of keys and values
    shape |= {"num_key_value_heads": heads if heads % 2 else heads // 2, "head_dim": width // heads}
    if family == "qwen-moe":
        return transformers.Qwen3MoeConfig(**shape, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=width)
    return transformers.Qwen3Config(**shape)


def workload(
    family: str = "llama",
    lr: float = 2e-3,
    batch: int = 32,
    steps: int = 350,
    num_blocks: int = 4,
    width: int = 64,
    heads: int = 4,
    tied: bool = False,
    seed: int = 0,
    data: str | None = None,
    dropout: float = 0.0,
) -> Workload:
    """A small Llama, Qwen 3 or GPT-2 of `transformers`, with random weights, on the data of `text`: 64 tokens a sample.

    Mixtral and the mixture of Qwen 3 (qwen-moe) have four experts in each block, and each token uses two.
    `dropout` applies to attention weights; in GPT-2 also to the embedding and to each layer's output.
    """
    check_dropout(dropout)
    if family not in FAMILIES:
        raise WorkloadError(f"--set family={family}: give one of {', '.join(FAMILIES)}")
    check_at_least_one(num_blocks=num_blocks, width=width, heads=heads)
    if width % (2 * heads):
        raise WorkloadError(f"--set width={width} heads={heads}: give a width that is a multiple of {2 * heads}")
    model_parts = from_transformers(_config(family, num_blocks, width, heads, tied, dropout))
    return dataclasses.replace(
        text(lr=lr, batch=batch, steps=steps, seed=seed, data=data),
        name="causal-lm",
        model=model_parts.model,
        blocks=model_parts.blocks,
        tensor_plan=model_parts.tensor_plan,
        experts=model_parts.experts,
    )
