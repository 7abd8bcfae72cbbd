"""Models of transformers: built without a download, split by their own plan, and equal to themselves on two ranks."""

from __future__ import annotations

import importlib.util
import re
import socket
import sys
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
from integration.conftest import absent
from parity.test_equal import in_float64

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
LAYER = "model.model.layers.*"


@pytest.fixture
def transformers(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The library, which cannot reach anything."""
    if importlib.util.find_spec("transformers") is None:
        absent("transformers (pip install 'everyrank[transformers]')")

    connect: Any = socket.socket.connect

    def refuse(*words: object) -> None:
        if isinstance(words[1], str):  # a socket of this machine: how ranks of the tests are forked
            connect(*words)
            return
        raise AssertionError(f"something connects to {words[1:]}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    import transformers

    return transformers


def check_all(world: World, family: str, tied: bool, layouts: list[str]) -> list[tuple[Parity, list[float]]]:
    """Parity and losses of each layout, in the ranks."""
    workload = find_workload("causal-lm", family=family, tied=tied, num_blocks=2, width=32, batch=8)
    data = open_data(workload, world)
    subject = parity_case(workload, *data, steps=6)
    return [check_layout(subject, parse_layout(text), world, f"causal-lm/{family}/{tied}/{text}") for text in layouts]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_equal(transformers: Any, ranks: Any, family: str, tied: bool) -> None:
    """Every layer of every family computes the same whoever holds it, and learns; untied in float32, too.

    Tolerance: 1e-10 relative for each loss, in float64; these runs see 4e-16.
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
def test_equal_in_parts(transformers: Any, ranks: Any, family: str, layouts: list[str]) -> None:
    """On four ranks, split by transformers' own plan and cut at its own blocks; float32 is compared on two ranks."""
    found = ranks(4, check_all, family, True, in_float64(layouts))[0]
    for layout, (parity, _) in zip(layouts, found, strict=True):
        assert parity.status == "equal", (layout, parity.first_divergence, parity.cause)
        assert parity.max_relative_difference is not None
        assert parity.max_relative_difference <= 1e-10


@pytest.mark.parametrize(
    ("family", "layouts"), [("gpt2", ["ddp:recompute", "context", "pipeline"]), ("llama", ["tensor"])]
)
def test_equal_with_dropout(transformers: Any, ranks: Any, family: str, layouts: list[str]) -> None:
    """Of attention weights, and of what GPT-2 drops besides: the masks of one device."""
    for layout, parity in zip(layouts, ranks(2, check_dropping, family, layouts)[0], strict=True):
        assert parity.status == "equal", (layout, parity.first_divergence, parity.cause)


def check_dropping(world: World, family: str, layouts: list[str]) -> list[Parity]:
    workload = find_workload("causal-lm", family=family, num_blocks=2, width=32, batch=8, heads=2, dropout=0.1)
    case = parity_case(workload, *open_data(workload, world), steps=3, is_quick=True)
    return [check_layout(case, parse_layout(text), world, f"dropping/{family}/{text}")[0] for text in layouts]


def test_too_few_heads(transformers: Any, ranks: Any) -> None:
    """Two heads of keys and values on four ranks: one line."""
    [(parity, _)] = ranks(4, check_all, "qwen", False, ["tensor"])[0]
    assert parity.status == "refused"
    assert re.search(r"tensor_plan: .*k_proj", parity.reason)


def test_no_plan(transformers: Any, ranks: Any) -> None:
    """GPT-2 has query, key and value in one layer of its own kind, and no plan."""
    [(parity, _)] = ranks(2, check_all, "gpt2", False, ["tensor"])[0]
    assert parity.status == "refused"
    assert "has no tensor_plan" in parity.reason


class Calls(TorchFunctionMode):
    """What attention is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[Tensor | None, bool]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            self.found.append((kwargs["attn_mask"], kwargs["is_causal"]))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", FAMILIES)
def test_positions_are_an_input(transformers: Any, family: str) -> None:
    """A rank that holds the head and the tail of a text says so, and its attention gets no mask of its own for it."""
    workload = find_workload("causal-lm", family=family, num_blocks=2)
    model = workload.model().eval()
    tokens = torch.arange(32).expand(2, -1)
    head = torch.arange(32).expand(2, -1)
    head_and_tail = torch.cat([torch.arange(16), torch.arange(48, 64)]).expand(2, -1)
    outputs = []
    for positions in (head, head_and_tail):
        with Calls() as calls:
            outputs.append(model(tokens=tokens, positions=positions))
        assert calls.found == [(None, True)] * 2
    assert outputs[0].shape == (2, 32, 256)
    # the first tokens see only themselves, where they always stood; those that moved notice
    torch.testing.assert_close(outputs[0][:, :16], outputs[1][:, :16])
    assert (outputs[0][:, 16:] - outputs[1][:, 16:]).abs().max() > 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_the_model_of_transformers(transformers: Any, family: str) -> None:
    """The same logits as the library's own forward, and the same under torch's RMSNorm, which is no other function."""
    ours = find_workload("causal-lm", family=family, num_blocks=2).model().eval()
    theirs = transformers.AutoModelForCausalLM.from_config(ours.model.config).eval()
    theirs.load_state_dict(ours.model.state_dict())
    tokens = torch.randint(0, 256, (2, 64), generator=torch.Generator().manual_seed(0))
    found = ours(tokens, torch.arange(64).expand(2, -1))
    torch.testing.assert_close(found, theirs(tokens).logits, rtol=1e-4, atol=1e-5)
    norms = {type(module) for module in ours.modules() if "Norm" in type(module).__name__}
    assert norms == {nn.LayerNorm if family == "gpt2" else nn.RMSNorm}


def test_another_norm_stays(transformers: Any) -> None:
    """Gemma's multiplies by 1 + weight."""
    model = from_transformers(transformers.GemmaConfig(**SMALL, head_dim=8)).model()
    assert not any(isinstance(module, nn.RMSNorm) for module in model.modules())


def test_plans(transformers: Any) -> None:
    """The library's own, in our words; GPT-2 has none."""
    llama = {
        "model.model.embed_tokens": "vocabulary",
        f"{LAYER}.self_attn.q_proj": "colwise",
        f"{LAYER}.self_attn.k_proj": "colwise",
        f"{LAYER}.self_attn.v_proj": "colwise",
        f"{LAYER}.self_attn.o_proj": "rowwise",
        f"{LAYER}.mlp.gate_proj": "colwise",
        f"{LAYER}.mlp.up_proj": "colwise",
        f"{LAYER}.mlp.down_proj": "rowwise",
        "model.lm_head": "colwise_gather",
    }
    norms = {f"{LAYER}.self_attn.q_norm": "replicate_sum", f"{LAYER}.self_attn.k_norm": "replicate_sum"}
    found = {family: find_workload("causal-lm", family=family) for family in FAMILIES}
    assert found["llama"].tensor_plan == llama
    assert found["qwen"].tensor_plan == llama | norms
    assert found["gpt2"].tensor_plan is None
    without_mlp = {name: word for name, word in llama.items() if ".mlp." not in name}
    assert found["mixtral"].tensor_plan == without_mlp  # experts are whole
    assert found["qwen-moe"].tensor_plan == without_mlp | norms
    blocks = {family: found[family].blocks for family in FAMILIES}
    assert blocks == {**dict.fromkeys(FAMILIES, "model.model.layers"), "gpt2": "model.transformer.h"}
    experts = [found[family].experts for family in FAMILIES]
    assert experts == [None, None, None, f"{LAYER}.mlp.experts", f"{LAYER}.mlp.experts"]


def test_tied_weights_are_split_alike(transformers: Any) -> None:
    """Also where the library's plan names only one of the two."""
    sizes = {name: value for name, value in SMALL.items() if name != "num_key_value_heads"}
    for tied in (False, True):
        found = from_transformers(transformers.GPTNeoXConfig(**sizes, tie_word_embeddings=tied))
        assert found.tensor_plan is not None
        assert found.tensor_plan["model.lm_head"] == "colwise_gather"
        assert found.tensor_plan.get("model.gpt_neox.embed_in") == ("vocabulary" if tied else None)


def test_a_word_that_we_have_not(transformers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Named, with the way out."""
    config = transformers.MixtralConfig(**SMALL)
    plan = {**config.base_model_tp_plan, "layers.*.self_attn": "local_params"}
    monkeypatch.setattr(transformers.MixtralConfig, "base_model_tp_plan", plan)
    with pytest.raises(WorkloadError, match=r"MixtralForCausalLM .*attn.* tensor=False"):
        from_transformers(config)
    found = from_transformers(config, tensor=False)
    assert (found.blocks, found.tensor_plan) == ("model.model.layers", None)
    assert found.experts == "model.model.layers.*.mlp.experts"
    assert found.model()(torch.ones(1, 4, dtype=torch.long), torch.arange(4)[None]).shape == (1, 4, 64)


def test_a_plan_for_parts_that_are_not_there(transformers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library has one plan for a family; only what this model has is split."""
    config = transformers.LlamaConfig(**SMALL)
    before = from_transformers(config).tensor_plan
    plan = {**config.base_model_tp_plan, "layers.*.mlp.experts": "moe_tp_experts", "layers.*.extra": "rowwise"}
    monkeypatch.setattr(transformers.LlamaConfig, "base_model_tp_plan", plan)
    assert from_transformers(config).tensor_plan == before


def test_what_is_no_such_model(transformers: Any) -> None:
    """One line for a config of another kind, and for a model that does without torch's attention."""
    with pytest.raises(WorkloadError, match="T5Config: Unrecognized configuration"):
        from_transformers(transformers.T5Config())
    with pytest.raises(WorkloadError, match=r"Gemma2Config: .*scaled_dot_product_attention"):
        from_transformers(transformers.Gemma2Config(**SMALL, head_dim=8))


def test_a_config_is_not_changed(transformers: Any) -> None:
    """It may be of a model that somebody trains elsewhere."""
    config = transformers.LlamaConfig(**SMALL, dtype="bfloat16", attn_implementation="eager")
    before = config.to_dict()
    model = from_transformers(config).model()
    assert config.to_dict() == before
    assert config._attn_implementation == "eager"
    assert next(model.parameters()).dtype == torch.float32


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"family": "bert"}, "family=bert: .* llama, qwen, gpt2"),
        ({"heads": 0}, "heads=0: give at least 1"),
        ({"heads": 5}, "a multiple of 10"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], says: str) -> None:
    """The setting and what it may be, in one line."""
    with pytest.raises(WorkloadError, match=says):
        find_workload("causal-lm", **settings)


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """The extra that brings it."""
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(CannotRunError, match=r"pip install 'everyrank\[transformers\]'"):
        find_workload("causal-lm")
