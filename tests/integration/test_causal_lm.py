"""Models of transformers are built without a download, split by the library's plan, and equivalent on all layouts."""

from __future__ import annotations

import importlib.util
import re
import socket
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from everyrank import find_workload, parse_layout
from everyrank.builtin.causal_lm import FAMILIES, from_transformers
from everyrank.errors import CannotRunError, WorkloadError
from everyrank.loop import open_data
from everyrank.parity import check_layout, parity_case
from everyrank.record import Parity
from everyrank.world import World
from forkserver import ForkServer
from integration.conftest import skip_without
from parity.test_equal import in_float64
from processes import Pool, open_pools

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LAYERS = "model.model.layers.*"


@pytest.fixture(scope="session")
def _server() -> Iterator[ForkServer]:
    """Yield a fork server that has imported transformers. Otherwise each rank would take seconds to import it."""
    server = ForkServer("transformers")
    yield server
    server.close()


@pytest.fixture(scope="session")
def _pools() -> Iterator[dict[int, Pool]]:
    """Yield the pools of ranks that this server has forked."""
    with open_pools() as pools:
        yield pools


@pytest.fixture
def transformers(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the transformers library, with network access blocked."""
    if importlib.util.find_spec("transformers") is None:
        skip_without("transformers (pip install 'everyrank[transformers]')")

    connect: Any = socket.socket.connect

    def refuse(*args: object) -> None:
        if isinstance(args[1], str):  # the tests fork their ranks over a Unix socket
            connect(*args)
            return
        raise AssertionError(f"a network connection was opened to {args[1:]}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    import transformers

    return transformers


def check_all(
    world: World, family: str, tied: bool, layouts: list[str], steps: int = 6
) -> list[tuple[Parity, list[float]]]:
    """Return parity and losses of each layout. Runs in the ranks."""
    workload = find_workload("causal-lm", family=family, tied=tied, num_blocks=2, width=32, batch=8)
    data = open_data(workload, world)
    case = parity_case(workload, *data, steps=steps)
    return [check_layout(case, parse_layout(text), world, f"causal-lm/{family}/{tied}/{text}") for text in layouts]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_equal_under_ddp_and_fsdp(transformers: Any, ranks: Any, family: str, tied: bool) -> None:
    """Two ranks train like one, and the loss decreases. Untied weights are also compared in float32.

    The tolerance of each loss in float64 is 1e-10 relative. These runs measure 4e-16.
    """
    layouts = ["ddp", "fsdp", "ddp:recompute"]
    layouts = in_float64(layouts) if tied else layouts
    for layout, (parity, losses) in zip(layouts, ranks(2, check_all, family, tied, layouts)[0], strict=True):
        assert parity.status == "equal", (layout, parity.first_divergence, parity.cause)
        assert parity.max_relative_difference is not None
        assert parity.max_relative_difference <= 1e-10
        assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("family", "layouts"),
    [
        ("llama", ["fsdp:tensor=2", "pipeline:tensor=2,schedule=gpipe", "ddp:context=2"]),
        ("qwen", ["fsdp:tensor=2", "pipeline:shard=2"]),
        ("mixtral", ["ddp:expert=2", "fsdp:expert=2,tensor=2"]),
        ("qwen-moe", ["expert", "fsdp:expert=2", "fsdp:expert=2,accumulate=2,recompute"]),
        ("gpt2", ["fsdp:context=2", "pipeline:pipeline=2,replicate=2,schedule=zero-bubble", "fsdp:replicate=2"]),
    ],
)
def test_model_parallel_layouts_are_equal(transformers: Any, ranks: Any, family: str, layouts: list[str]) -> None:
    """Four ranks split the model by the tensor plan and the blocks of transformers. Two ranks compare float32."""
    results = ranks(4, check_all, family, True, in_float64(layouts), 4)[0]
    for layout, (parity, _) in zip(layouts, results, strict=True):
        assert parity.status == "equal", (layout, parity.first_divergence, parity.cause)
        assert parity.max_relative_difference is not None
        assert parity.max_relative_difference <= 1e-10


@pytest.mark.parametrize(
    ("family", "layouts"), [("gpt2", ["ddp:recompute", "context", "pipeline"]), ("llama", ["tensor"])]
)
def test_dropout_is_equal(transformers: Any, ranks: Any, family: str, layouts: list[str]) -> None:
    """The dropout masks of attention weights, and the other masks of GPT-2, are the masks of one device."""
    for layout, parity in zip(layouts, ranks(2, check_with_dropout, family, layouts)[0], strict=True):
        assert parity.status == "equal", (layout, parity.first_divergence, parity.cause)


def check_with_dropout(world: World, family: str, layouts: list[str]) -> list[Parity]:
    """Return parity of each layout with dropout. Runs in the ranks."""
    workload = find_workload("causal-lm", family=family, num_blocks=2, width=32, batch=8, heads=2, dropout=0.1)
    case = parity_case(workload, *open_data(workload, world), steps=3, is_quick=True)
    return [check_layout(case, parse_layout(text), world, f"dropout/{family}/{text}")[0] for text in layouts]


def test_tensor_layout_with_too_few_key_value_heads_is_refused(transformers: Any, ranks: Any) -> None:
    """Two key-value heads cannot be split over four ranks. The reason names the layer."""
    [(parity, _)] = ranks(4, check_all, "qwen", False, ["tensor"])[0]
    assert parity.status == "refused"
    assert re.search(r"tensor_plan: .*k_proj", parity.reason)


def test_tensor_layout_without_a_tensor_plan_is_refused(transformers: Any, ranks: Any) -> None:
    """GPT-2 has no tensor plan, because one Conv1D layer computes query, key and value."""
    [(parity, _)] = ranks(2, check_all, "gpt2", False, ["tensor"])[0]
    assert parity.status == "refused"
    assert "has no tensor_plan" in parity.reason


class AttentionCalls(TorchFunctionMode):
    """Records the mask and `is_causal` of each call of scaled_dot_product_attention."""

    def __init__(self) -> None:
        super().__init__()
        self.arguments: list[tuple[Tensor | None, bool]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            self.arguments.append((kwargs["attn_mask"], kwargs["is_causal"]))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", FAMILIES)
def test_model_takes_positions_and_builds_no_mask_for_them(transformers: Any, family: str) -> None:
    """A context-parallel rank passes the positions of the head and the tail of a text. The model adds no mask."""
    workload = find_workload("causal-lm", family=family, num_blocks=2)
    model = workload.model().eval()
    tokens = torch.arange(32).expand(2, -1)
    head = torch.arange(32).expand(2, -1)
    head_and_tail = torch.cat([torch.arange(16), torch.arange(48, 64)]).expand(2, -1)
    outputs = []
    for positions in (head, head_and_tail):
        with AttentionCalls() as calls:
            outputs.append(model(tokens=tokens, positions=positions))
        assert calls.arguments == [(None, True)] * 2
    assert outputs[0].shape == (2, 32, 256)
    # causal attention: the first 16 tokens have the same positions and context, the others have different positions
    torch.testing.assert_close(outputs[0][:, :16], outputs[1][:, :16])
    assert (outputs[0][:, 16:] - outputs[1][:, 16:]).abs().max() > 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_equal_to_transformers(transformers: Any, family: str) -> None:
    """The model has the logits of AutoModelForCausalLM, although torch's RMSNorm replaces the library's."""
    model = find_workload("causal-lm", family=family, num_blocks=2).model().eval()
    expected = transformers.AutoModelForCausalLM.from_config(model.model.config).eval()
    expected.load_state_dict(model.model.state_dict())
    tokens = torch.randint(0, 256, (2, 64), generator=torch.Generator().manual_seed(0))
    logits = model(tokens, torch.arange(64).expand(2, -1))
    torch.testing.assert_close(logits, expected(tokens).logits, rtol=1e-4, atol=1e-5)
    norms = {type(module) for module in model.modules() if "Norm" in type(module).__name__}
    assert norms == {nn.LayerNorm if family == "gpt2" else nn.RMSNorm}


def test_norm_with_a_different_formula_is_not_replaced(transformers: Any) -> None:
    """Gemma's norm multiplies by 1 + weight, so torch's RMSNorm would be wrong."""
    model = from_transformers(transformers.GemmaConfig(**SMALL, head_dim=8)).model()
    assert not any(isinstance(module, nn.RMSNorm) for module in model.modules())


def test_tensor_plans_blocks_and_experts_of_all_families(transformers: Any) -> None:
    """They follow from the tensor plan of the library. GPT-2 has none."""
    llama = {
        "model.model.embed_tokens": "vocabulary",
        f"{LAYERS}.self_attn.q_proj": "colwise",
        f"{LAYERS}.self_attn.k_proj": "colwise",
        f"{LAYERS}.self_attn.v_proj": "colwise",
        f"{LAYERS}.self_attn.o_proj": "rowwise",
        f"{LAYERS}.mlp.gate_proj": "colwise",
        f"{LAYERS}.mlp.up_proj": "colwise",
        f"{LAYERS}.mlp.down_proj": "rowwise",
        "model.lm_head": "colwise_gather",
    }
    norms = {f"{LAYERS}.self_attn.q_norm": "replicate_sum", f"{LAYERS}.self_attn.k_norm": "replicate_sum"}
    workloads = {family: find_workload("causal-lm", family=family) for family in FAMILIES}
    assert workloads["llama"].tensor_plan == llama
    assert workloads["qwen"].tensor_plan == llama | norms
    assert workloads["gpt2"].tensor_plan is None
    without_mlp = {name: style for name, style in llama.items() if ".mlp." not in name}
    assert workloads["mixtral"].tensor_plan == without_mlp  # tensor parallelism does not split experts
    assert workloads["qwen-moe"].tensor_plan == without_mlp | norms
    blocks = {family: workloads[family].blocks for family in FAMILIES}
    assert blocks == {**dict.fromkeys(FAMILIES, "model.model.layers"), "gpt2": "model.transformer.h"}
    experts = [workloads[family].experts for family in FAMILIES]
    assert experts == [None, None, None, f"{LAYERS}.mlp.experts", f"{LAYERS}.mlp.experts"]


def test_tied_weights_are_split_in_the_same_way(transformers: Any) -> None:
    """The library's plan of GPT-NeoX names only one of the two tied weights."""
    sizes = {name: value for name, value in SMALL.items() if name != "num_key_value_heads"}
    for tied in (False, True):
        workload = from_transformers(transformers.GPTNeoXConfig(**sizes, tie_word_embeddings=tied))
        assert workload.tensor_plan is not None
        assert workload.tensor_plan["model.lm_head"] == "colwise_gather"
        assert workload.tensor_plan.get("model.gpt_neox.embed_in") == ("vocabulary" if tied else None)


def test_unsupported_style_in_a_tensor_plan_is_refused(transformers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the layer and `tensor=False`, which leaves the tensor plan out."""
    config = transformers.MixtralConfig(**SMALL)
    plan = {**config.base_model_tp_plan, "layers.*.self_attn": "local_params"}
    monkeypatch.setattr(transformers.MixtralConfig, "base_model_tp_plan", plan)
    with pytest.raises(WorkloadError, match=r"MixtralForCausalLM .*attn.* tensor=False"):
        from_transformers(config)
    workload = from_transformers(config, tensor=False)
    assert (workload.blocks, workload.tensor_plan) == ("model.model.layers", None)
    assert workload.experts == "model.model.layers.*.mlp.experts"
    assert workload.model()(torch.ones(1, 4, dtype=torch.long), torch.arange(4)[None]).shape == (1, 4, 64)


def test_plan_entries_for_missing_modules_are_ignored(transformers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library has one plan for a family, which may name modules that this model does not have."""
    config = transformers.LlamaConfig(**SMALL)
    expected_plan = from_transformers(config).tensor_plan
    plan = {**config.base_model_tp_plan, "layers.*.mlp.experts": "moe_tp_experts", "layers.*.extra": "rowwise"}
    monkeypatch.setattr(transformers.LlamaConfig, "base_model_tp_plan", plan)
    assert from_transformers(config).tensor_plan == expected_plan


def test_unsupported_configs_are_refused(transformers: Any) -> None:
    """T5 is not a causal language model, and Gemma 2 does not use scaled_dot_product_attention."""
    with pytest.raises(WorkloadError, match="T5Config: Unrecognized configuration"):
        from_transformers(transformers.T5Config())
    with pytest.raises(WorkloadError, match=r"Gemma2Config: .*scaled_dot_product_attention"):
        from_transformers(transformers.Gemma2Config(**SMALL, head_dim=8))


def test_from_transformers_does_not_change_the_config(transformers: Any) -> None:
    """The user may build other models from the same config."""
    config = transformers.LlamaConfig(**SMALL, dtype="bfloat16", attn_implementation="eager")
    original = config.to_dict()
    model = from_transformers(config).model()
    assert config.to_dict() == original
    assert config._attn_implementation == "eager"
    assert next(model.parameters()).dtype == torch.float32


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"family": "bert"}, "family=bert: .* llama, qwen, gpt2"),
        ({"heads": 0}, "heads=0: give at least 1"),
        ({"heads": 5}, "a multiple of 10"),
    ],
)
def test_invalid_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    """The error names the setting and its valid values."""
    with pytest.raises(WorkloadError, match=message):
        find_workload("causal-lm", **settings)


def test_error_without_transformers_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(CannotRunError, match=r"pip install 'everyrank\[transformers\]'"):
        find_workload("causal-lm")
