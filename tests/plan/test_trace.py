"""The real prepare and step on fake tensors: memory and communication of each rank, on more ranks than CPU cores."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from everyrank.builtin import DECODER_EXPERTS, Decoder, DecoderShape, decoder_plan
from everyrank.errors import UsageError
from everyrank.layout import parse_layout
from everyrank.plan import traced
from everyrank.plan.as_on_gpu import take_all_at_once
from everyrank.plan.calibrate import decoder_workload
from everyrank.plan.hardware import GIB, parse_cluster
from everyrank.plan.pretend import TracedStep, first_sample, read_samples, trace_step
from everyrank.plan.trace import StorageTrace
from everyrank.plan.traced import LayoutMemory, Timing, answer_workload, trace_layout
from everyrank.workload import Workload
from everyrank.world import World

TENSOR = pytest.param("fsdp:tensor=2,precision=bf16", marks=pytest.mark.integration)
BLOCKS, WIDTH, LENGTH, VOCABULARY = 4, 32, 16, 64


def decoder(num_blocks: int = BLOCKS, batch: int = 64) -> Workload:
    """Return a workload with a small decoder."""
    shape = DecoderShape(num_blocks=num_blocks, num_heads=4, width=WIDTH, hidden=64, vocabulary=VOCABULARY)
    return decoder_workload(shape, 64, LENGTH, global_batch=batch, sequence_dim=1, steps=1)


def parameter_bytes(workload: Workload) -> int:
    """Return the bytes of all parameters of the model."""
    return sum(p.nbytes for p in workload.model().parameters())


def test_fsdp_on_64_ranks_has_the_documented_collectives() -> None:
    """Each block has an all-gather in forward and backward, and a reduce-scatter.

    The other parameters have one all-gather and one reduce-scatter. The loss has one all-reduce.
    """
    step = trace_step(decoder(), parse_layout("fsdp"), 64, rank=63)
    assert step.collectives() == {
        "_allgather_base_": 2 * BLOCKS + 1,
        "_reduce_scatter_base_": BLOCKS + 1,
        "allreduce_": 1,
    }
    # A rank has 1/64 of the parameters, gradients and two moments, with padding.
    assert step.state_bytes < parameter_bytes(decoder()) * 4 / 64 * 1.2
    assert step.peak_bytes == sum(step.categories.values())


def test_ddp_all_reduces_and_zero1_broadcasts() -> None:
    """DDP reduces each bucket. ZeRO-1 broadcasts from each rank that owns parameters."""
    assert set(trace_step(decoder(), parse_layout("ddp"), 64).collectives()) == {"allreduce_"}
    zero1_step = trace_step(decoder(), parse_layout("zero1"), 8, rank=3)
    assert zero1_step.collectives()["broadcast_"] == 8


def test_rank_with_the_most_optimizer_state_is_traced() -> None:
    """Rank 0 owns 500 elements, and rank 1 owns 400 and 300. The weights come from numpy, so meta tensors fail."""

    class Three(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            sizes = (500, 400, 300)
            weights = [torch.from_numpy(np.ones(size, np.float32)) * torch.ones(size) for size in sizes]
            self.parts = nn.ParameterList(map(nn.Parameter, weights))

        def forward(self, values: Tensor) -> Tensor:
            return values * sum(part.sum() for part in self.parts)

    workload = Workload(
        name="three",
        model=Three,
        train_data=lambda: [(torch.ones(4), torch.ones(4))] * 16,
        loss=lambda output, target: ((output - target).square().sum(), target.numel()),
        optimizer=lambda model: torch.optim.Adam(model.parameters()),
        global_batch=8,
    )
    sample = first_sample(workload)
    zero1 = trace_layout(workload, parse_layout("zero1"), 2, sample)
    assert zero1.rank == 1
    assert zero1.categories["optimizer"] >= 2 * 4 * 700


def test_compression_of_gradients_is_traced() -> None:
    """PowerSGD keeps an error of the size of each matrix. Gradients in 16 bits are half as large on the way."""
    workload = decoder(num_blocks=1, batch=8)
    plain_step, powersgd_step, half_step = (
        trace_step(workload, parse_layout(layout), 2)
        for layout in ("ddp", "ddp:compress=powersgd", "ddp:compress=bf16")
    )
    assert powersgd_step.state_bytes > plain_step.state_bytes + 0.9 * parameter_bytes(workload)

    def largest_message(step: TracedStep) -> int:
        return max(operator.bytes for operator in step.operators if operator.group)

    assert largest_message(powersgd_step) < 0.2 * largest_message(plain_step)
    assert largest_message(half_step) == pytest.approx(largest_message(plain_step) / 2, rel=0.01)


def test_local_sgd_is_traced_with_an_average() -> None:
    """The replicas are averaged every 8 updates, which takes memory. The traced update has no average."""
    workload = decoder(num_blocks=1, batch=2)
    sample = first_sample(workload)
    rare, frequent = (
        trace_layout(workload, parse_layout(layout), 2, sample) for layout in ("local_sgd:every=8", "local_sgd")
    )
    assert rare.allocated > 0.99 * frequent.allocated
    assert (rare.sent, frequent.sent > 0) == (0, True)
    assert "average after each 8 updates is in the memory, but not in the time" in rare.note


def test_layout_of_one_process_is_traced_on_a_larger_cluster() -> None:
    """`single` has the whole batch on one of the GPUs. The devices of one process cannot be traced."""
    workload = decoder(num_blocks=1, batch=8)
    plan = answer_workload(workload, "decoder", "decoder.py", parse_cluster("4xh100"), ["single"])
    row = plan["layouts"][0]
    assert (row["verdict"], row["note"]) == ("fits", "traced whole")
    assert row["flops"] == trace_step(workload, parse_layout("single"), 1).flops
    with pytest.raises(UsageError, match="use ddp"):
        trace_layout(workload, parse_layout("dataparallel"), 4, first_sample(workload))


def test_pipeline_of_four_stages_sends_each_micro_batch() -> None:
    """Inner stages receive and send. Each micro-batch passes once in each direction."""
    layout = parse_layout("pipeline:microbatches=8")
    first_stage, inner_stage = (trace_step(decoder(), layout, 4, rank) for rank in (0, 1))
    assert first_stage.collectives()["send"] == 8
    assert inner_stage.collectives()["send"] == inner_stage.collectives()["recv_"] == 16
    assert first_stage.peak_bytes > inner_stage.peak_bytes, "the first stage keeps the most micro-batches"
    assert first_stage.build_bytes < first_stage.peak_bytes, (
        "the whole model, which gives the shape of an input, is not counted"
    )


@pytest.mark.parametrize(
    "layout",
    [
        "local_sgd",
        pytest.param("fsdp:replicate=4,recompute", marks=pytest.mark.integration),
        pytest.param("context", marks=pytest.mark.integration),
        TENSOR,
    ],
)
def test_other_layouts_run_on_many_ranks(layout: str) -> None:
    """The step runs, and has memory and FLOPs."""
    step = trace_step(decoder(), parse_layout(layout), 8, rank=7)
    assert step.peak_bytes > step.state_bytes > 0
    assert step.flops > 0


def test_operators_are_kernels_with_flops() -> None:
    """Attention on a CPU has its FLOPs, and 2.5 times as many in backward.

    An operator that only looks up a device is not a kernel.
    """
    operators = trace_step(decoder(num_blocks=1, batch=8), parse_layout("ddp"), 2).operators
    attention_flops = [operator.flops for operator in operators if "scaled_dot" in operator.name]
    forward_flops = 2 * 2 * 4 * LENGTH * LENGTH * WIDTH  # two products of 4 samples, all heads together
    assert attention_flops == [forward_flops, forward_flops * 5 // 2]
    assert not {"device", "promote_types"} & {operator.name for operator in operators}
    assert any(operator.is_strided for operator in operators), "rotary positions take every second number"


def test_recompute_uses_less_memory_and_more_flops() -> None:
    """Activation checkpointing reduces the peak memory and adds FLOPs."""
    plain_step, recompute_step = (trace_step(decoder(), parse_layout(layout), 2) for layout in ("ddp", "ddp:recompute"))
    assert recompute_step.peak_bytes < plain_step.peak_bytes
    assert recompute_step.flops > plain_step.flops


def test_tensor_parallel_keeps_only_its_state_between_updates() -> None:
    """The state has parameters, gradients and two moments. The check of views, which keeps outputs, has ended."""
    step = trace_step(decoder(num_blocks=1), parse_layout("tensor"), 2)
    assert step.state_bytes < 4.2 * parameter_bytes(decoder(num_blocks=1))


def test_fake_tensors_for_dtensor_shapes_are_not_counted() -> None:
    """A rank of two has half of the logits. DTensor creates fake tensors of all logits to get the shape of the loss."""
    shape = DecoderShape(num_blocks=1, num_heads=4, width=WIDTH, hidden=64, vocabulary=4096)
    workload = decoder_workload(shape, 8, LENGTH, global_batch=8, sequence_dim=1, steps=1)
    step = trace_step(workload, parse_layout("tensor"), 2)
    bytes_of_half_logits = 8 * LENGTH * 4096 // 2 * 4
    assert max(change for change, *_ in step.events) == bytes_of_half_logits
    product_flops = [operator.flops for operator in step.operators if operator.name in ("mm", "addmm")]
    assert max(product_flops) == 2 * 8 * LENGTH * WIDTH * 4096 // 2


def test_experts_get_equal_numbers_of_tokens() -> None:
    """Fake tensors have no counts, so the tokens are spread evenly.

    Half of the rows come back from the other rank.
    """
    shape = DecoderShape(1, 4, WIDTH, 64, VOCABULARY, experts=4)
    workload = dataclasses.replace(
        decoder(batch=8), model=lambda: Decoder(shape), tensor_plan=decoder_plan(shape), experts=DECODER_EXPERTS
    )
    step = trace_step(workload, parse_layout("expert"), 2)
    sent_bytes = [operator.bytes for operator in step.operators if operator.name == "alltoall_base_"]
    rows = 8 // 2 * LENGTH * shape.top_k
    assert sent_bytes == [4 * 8, *[rows * WIDTH * 4] * 4]
    assert step.state_bytes < trace_step(workload, parse_layout("ddp"), 2).state_bytes


class Recurrent(nn.Module):
    """An LSTM over a sequence of 8 numbers, or a lookup of 8 rows in a large table."""

    def __init__(self, is_lookup: bool = False) -> None:
        super().__init__()
        self.lstm = None if is_lookup else nn.LSTM(1, 32, batch_first=True)
        self.table = nn.EmbeddingBag(10_000, 8) if is_lookup else None

    def forward(self, value: Tensor) -> Tensor:
        if self.table is not None:
            return self.table(value.long())
        assert self.lstm is not None
        return self.lstm(value.unsqueeze(-1))[0][:, :, 0]


def test_recurrent_layer_has_flops_on_a_cpu_and_no_time_on_a_gpu() -> None:
    """Each step of an LSTM multiplies by both matrices. A GPU has one kernel, which a CPU does not show."""
    workload = workload_with(Recurrent)
    step = trace_step(workload, parse_layout("single"), 1)
    forward_flops = 2 * 16 * 8 * (4 * 32 * 1 + 4 * 32 * 32)
    assert [operator.flops for operator in step.operators if operator.flops] == [forward_flops, 2 * forward_flops]
    row = answer_workload(workload, "lstm", "lstm.py", parse_cluster("1xh100"), ["single"])["layouts"][0]
    assert "step_seconds" not in row
    reason = "no roofline estimate, because on a GPU an RNN is one fused kernel, which the trace does not show"
    assert row["note"].endswith(reason)


def test_lookup_reads_a_few_rows() -> None:
    """The bytes of an embedding bag are those of its rows, not of the whole table."""
    step = trace_step(workload_with(lambda: Recurrent(is_lookup=True)), parse_layout("single"), 1)
    lookup = next(operator for operator in step.operators if operator.name == "_embedding_bag")
    assert lookup.bytes < 10_000 * 8 * 4 / 10


def test_token_counts_are_spread_evenly() -> None:
    """Counts come from one_hot, bincount or scatter_add. Other numbers stay unknown."""
    with FakeTensorMode(), StorageTrace():
        chosen_experts = torch.zeros(5, 2, dtype=torch.long)
        ones = torch.ones_like(chosen_experts.flatten())
        for counts in (
            F.one_hot(chosen_experts.flatten(), 4).sum(0),
            torch.bincount(chosen_experts.flatten(), minlength=4),
            torch.zeros(4, dtype=torch.long).scatter_add_(0, chosen_experts.flatten(), ones),
        ):
            assert counts.tolist() == [2, 3, 2, 3]
            assert torch.stack([counts, counts]).sum().item() == 20
        assert ones.sum().item() == 1


@pytest.mark.integration
def test_extrapolation_from_two_depths_matches_the_whole_model() -> None:
    """Of 16 equal blocks, 4 and 6 are traced. The extrapolation matches the trace of the whole model."""
    deep_decoder = decoder(16, batch=8)
    layout = parse_layout("fsdp")
    extrapolated = trace_layout(deep_decoder, layout, 4, first_sample(deep_decoder))
    whole_step = trace_step(deep_decoder, layout, 4)
    assert "4 and 6 of 16" in extrapolated.note
    assert extrapolated.allocated == pytest.approx(max(whole_step.peak_bytes, whole_step.build_bytes), rel=1e-3)
    assert dict(extrapolated.collectives) == whole_step.collectives()
    assert extrapolated.flops == whole_step.flops


def with_frozen_blocks(workload: Workload, count: int) -> Workload:
    """Return the workload with the first blocks of its model frozen."""

    def make_model() -> nn.Module:
        model = workload.model()
        for block in list(model.get_submodule("blocks"))[:count]:  # pyright: ignore[reportArgumentType]
            block.requires_grad_(False)
        return model

    return dataclasses.replace(workload, model=make_model)


def test_blocks_are_not_equal_if_only_some_are_frozen() -> None:
    """Frozen blocks have no gradients and no optimizer state, so the first blocks do not stand for the others."""
    layout = parse_layout("ddp")
    assert traced._depths(decoder(16), layout, 2) == (16, 4, 6)
    assert traced._depths(with_frozen_blocks(decoder(16), 16), layout, 2) == (16, 4, 6)
    assert traced._depths(with_frozen_blocks(decoder(16), 12), layout, 2) is None


class Indexed(nn.Module):
    """A model whose forward needs all of its blocks."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(num_blocks))
        self.num_blocks = num_blocks

    def forward(self, value: Tensor) -> Tensor:
        for index in range(self.num_blocks):
            value = self.blocks[index](value)
        return value


def test_model_whose_forward_needs_all_blocks_is_traced_whole() -> None:
    """Forward counts the blocks itself and fails with a part of them."""
    workload = dataclasses.replace(workload_with(lambda: Indexed(16)), blocks="blocks")
    assert traced._depths(workload, parse_layout("single"), 1) is not None
    memory = trace_layout(workload, parse_layout("single"), 1, first_sample(workload))
    assert (memory.has_activations, memory.note) == (True, "traced whole")


class Stacked(nn.Module):
    """A model of equal blocks."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Linear(8, 8) for _ in range(num_blocks)))

    def forward(self, value: Tensor) -> Tensor:
        return self.blocks(value)


def test_time_is_extrapolated_before_parts_overlap() -> None:
    """Communication that a few blocks hide may be exposed in a deep model, and no part may become negative."""
    workload, layout = dataclasses.replace(workload_with(lambda: Stacked(16)), blocks="blocks"), parse_layout("ddp")

    def hide_the_first_ten(sums: Mapping[str, float]) -> dict[str, float]:
        return {"exposed": max(sums["blocks"] - 10, 0.0)}

    timing = Timing(
        lambda step: {"blocks": float(sum(operator.name == "addmm" for operator in step.operators))}, hide_the_first_ten
    )
    memory = trace_layout(workload, layout, 2, first_sample(workload), timing=timing)
    assert "4 and 6 of 16" in memory.note
    assert dict(memory.seconds_by_part) == {"exposed": 6.0}


def test_another_moment_may_be_the_peak_of_a_deeper_model() -> None:
    """With few blocks the loss takes most memory, with many blocks the optimizer's step. Gaps grow with the peak."""

    def memory_at(blocks: int) -> LayoutMemory:
        peaks = (8.0 * blocks, 100 + 8.0 * blocks, 12.0 * blocks, 100 + 8.0 * blocks, 20.0 * blocks)
        categories = {"parameters": 4.0 * blocks, "activations": 100 + 4.0 * blocks}
        reserved = 1.25 * max(peaks)
        return LayoutMemory(
            0, categories, max(peaks), max(peaks[:3]), reserved, reserved, 0.0, 0.0, 0.0, {}, True, "", peaks=peaks
        )

    memory = traced._extrapolated(memory_at(4), memory_at(6), (100 - 4) / (6 - 4))
    assert memory.peaks == memory_at(100).peaks
    assert (memory.allocated, memory.building, memory.reserved) == (2000, 1200, 2500)
    assert sum(memory.categories.values()) == memory.allocated


class DataDependent(nn.Module):
    """A model whose shapes depend on values."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, value: Tensor) -> Tensor:
        return self.layer(value[value.sum(1).nonzero().squeeze(1)])


def workload_with(model: Callable[[], nn.Module]) -> Workload:
    """Return a workload with this model and 16 samples of ones."""
    data = torch.utils.data.TensorDataset(torch.ones(16, 8), torch.ones(16, 8))

    def loss(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
        return F.mse_loss(output, target, reduction="sum"), target.numel()

    return Workload("other", model, lambda: data, loss, lambda m: torch.optim.SGD(m.parameters(), 0.1), 16, steps=1)


@pytest.mark.parametrize("layout", ["single", "single:precision=float64"])
def test_tied_weights_count_once(layout: str) -> None:
    """The conversion to float64 replaces the parameters of fake tensors. Tied weights stay tied."""

    def make_model(is_tied: bool) -> nn.Module:
        model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Tanh(), nn.Linear(8, 8, bias=False))
        if is_tied:
            model[2].weight = model[0].weight
        return model

    tied_step, untied_step = (
        trace_step(workload_with(lambda is_tied=is_tied: make_model(is_tied)), parse_layout(layout), 1)
        for is_tied in (True, False)
    )
    assert 2 * tied_step.categories["parameters"] == untied_step.categories["parameters"]


def test_model_that_cannot_be_traced_may_not_fit() -> None:
    """Only the parameters are counted. The note has the reason."""
    plan = answer_workload(workload_with(DataDependent), "choosy", "choosy.py", parse_cluster("2xh100"), ["ddp"])
    row = plan["layouts"][0]
    assert row["verdict"] == "may not fit"
    assert row["categories"]["parameters"] == (8 * 8 + 8) * 4
    assert "not traced" in row["note"]


def test_model_that_cannot_be_traced_has_at_least_the_memory_of_its_state() -> None:
    """A frozen parameter has no gradient and no state, and SGD keeps none. So `does not fit` is sure."""

    def make_model() -> nn.Module:
        model = DataDependent()
        model.register_parameter("table", nn.Parameter(torch.zeros(1000, 8), requires_grad=False))
        return model

    trained_bytes, table_bytes = (8 * 8 + 8) * 4, 1000 * 8 * 4
    workload = workload_with(make_model)
    for changed, state in (
        (workload, 0),
        (dataclasses.replace(workload, optimizer=lambda m: torch.optim.AdamW(m.parameters())), 2),
    ):
        memory = trace_layout(changed, parse_layout("ddp"), 2, first_sample(changed))
        assert dict(memory.categories) == {
            "parameters": table_bytes + trained_bytes,
            "gradients": trained_bytes,
            "optimizer": state * trained_bytes,
        }
        assert not memory.has_activations


class Growing(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """A dataset of 12 samples, of which each is longer than the one before."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index == 11:
            raise ValueError("damaged")
        return torch.ones(index + 1, 8), torch.ones(index + 1, 8)


def test_note_names_what_a_prediction_lacks() -> None:
    """There are no rates of float64, which is up to 64 times slower than float32. Compiled kernels are not traced."""
    workload = workload_with(lambda: nn.Linear(8, 8))
    layouts = ["single", "single:precision=float64", "single:compile"]
    plain, float64, compiled = answer_workload(workload, "w", "w.py", parse_cluster("1xh100"), layouts)["layouts"]
    assert "step_seconds" in plain
    assert "step_seconds" not in float64
    assert "no roofline estimate, because the table of GPUs has no rates of float64" in float64["note"]
    assert compiled["note"] == "traced whole; without torch.compile"


def test_samples_that_differ_in_size_are_noted() -> None:
    """Three samples are read, and the largest is traced. A damaged one does not matter."""
    workload = dataclasses.replace(workload_with(lambda: nn.Linear(8, 8)), train_data=Growing)
    assert [sample[0].shape[1] for sample in read_samples(workload, 3)] == [1, 5, 9]
    assert len(read_samples(workload, 12)) == 11
    row = answer_workload(workload, "growing", "growing.py", parse_cluster("1xh100"), ["single"])["layouts"][0]
    assert row["note"] == "traced whole; samples differ in size, and the largest of 3 was traced"
    assert row["flops"] == 2 * 2 * 16 * 9 * 8 * 8
    equal = answer_workload(workload_with(lambda: nn.Linear(8, 8)), "w", "w.py", parse_cluster("1xh100"), ["single"])
    assert equal["layouts"][0]["note"] == "traced whole"


class Printing(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """A dataset that writes to standard output."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        sys.stdout.write(f"reading {index}\n")
        sys.stdout.flush()
        return torch.ones(8), torch.ones(8)


def test_dataset_may_write_to_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    """What it writes is dropped."""
    workload = dataclasses.replace(workload_with(lambda: nn.Linear(8, 8)), train_data=Printing)
    plan = answer_workload(workload, "printing", "printing.py", parse_cluster("1xh100"), ["single"])
    assert plan["layouts"][0]["verdict"] == "fits"
    assert not capsys.readouterr().out


def test_model_that_reads_weights_from_files_is_traced(tmp_path: Path) -> None:
    """Weights from torch and numpy files are read as fake tensors. A missing file is an error of the workload."""
    torch.save(torch.ones(8, 8), tmp_path / "weight.pt")
    np.save(tmp_path / "weight.npy", np.ones((8, 8), dtype=np.float32))

    def model_reading(read_weight: Callable[[], Tensor]) -> Callable[[], nn.Module]:
        def make_model() -> nn.Module:
            model = nn.Linear(8, 8)
            model.weight = nn.Parameter(read_weight())
            return model

        return make_model

    for read_weight in (
        lambda: torch.load(tmp_path / "weight.pt", weights_only=True),
        lambda: torch.from_numpy(np.load(tmp_path / "weight.npy")),
    ):
        layout_memory = trace_layout(
            workload_with(model_reading(read_weight)), parse_layout("ddp"), 2, (torch.ones(1, 8), torch.ones(1, 8))
        )
        assert layout_memory.has_activations
        assert layout_memory.categories["parameters"] >= (8 * 8 + 8) * 4
    workload_without_file = workload_with(model_reading(lambda: torch.load(tmp_path / "none.pt", weights_only=True)))
    with pytest.raises(UsageError, match=r"none\.pt"):
        trace_layout(workload_without_file, parse_layout("ddp"), 2, (torch.ones(1, 8), torch.ones(1, 8)))


@pytest.mark.integration
def test_smallest_change_of_a_workload_is_another_layout() -> None:
    """The GPU has too little memory for the workload. The proposed layout is different."""
    workload = decoder(batch=64)
    cluster = parse_cluster("2xt4", memory=2.5 * 2**30 + 6 * 2**20)
    plan = answer_workload(workload, "decoder", "decoder.py", cluster, ["ddp"])
    row = plan["layouts"][0]
    assert row["verdict"] == "may not fit"
    assert row["change"]["layout"] != "ddp"
    assert row["change"]["layout"] in row["change"]["command"]


def test_expandable_segments_are_the_smallest_change() -> None:
    """Expandable segments are proposed if only the gaps between blocks do not fit into the GPU's memory."""
    memory_with_gaps = LayoutMemory(0, {}, 7.9 * GIB, 0.0, 10 * GIB, 8 * GIB, 0.0, 0.0, 0.0, {}, True, "traced whole")
    cluster = parse_cluster("2xa100", memory=12.5 * GIB)
    assert memory_with_gaps.verdict(12.5 * GIB) == "may not fit"
    change = traced._change("ddp", lambda _: memory_with_gaps, cluster, "decoder.py", decoder())
    assert change["layout"] == "ddp"
    assert change["command"].startswith("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True everyrank train decoder.py")
    memory_without_gaps = dataclasses.replace(memory_with_gaps, expandable=10 * GIB)
    assert (
        "segments" not in traced._change("ddp", lambda _: memory_without_gaps, cluster, "decoder.py", decoder())["what"]
    )


@pytest.mark.parametrize(
    ("original_layout", "batch", "what", "layout"),
    [
        ("single", 64, "bf16, recompute, micro-batches 1/8 as large", "single:accumulate=8,precision=bf16,recompute"),
        ("single:recompute", 64, "bf16, micro-batches 1/8 as large", "single:accumulate=8,precision=bf16,recompute"),
        ("single", 4, "bf16, recompute, micro-batches 1/2 as large", "single:accumulate=2,precision=bf16,recompute"),
    ],
)
def test_changes_are_combined_if_no_single_change_fits(
    original_layout: str, batch: int, what: str, layout: str
) -> None:
    """No single change is enough on one GPU. All changes together are enough."""
    full_memory = LayoutMemory(0, {}, 10 * GIB, 0.0, 10 * GIB, 10 * GIB, 0.0, 0.0, 0.0, {}, True, "traced whole")
    small_memory = dataclasses.replace(full_memory, allocated=GIB, reserved=GIB, expandable=GIB)

    def memory_of(tried_layout: str) -> LayoutMemory:
        return (
            small_memory
            if all(option in tried_layout for option in ("accumulate", "bf16", "recompute"))
            else full_memory
        )

    change = traced._change(
        original_layout, memory_of, parse_cluster("1xa100", memory=8 * GIB), "decoder.py", decoder(batch=batch)
    )
    assert (change["what"], parse_layout(change["layout"])) == (what, parse_layout(layout))
    assert change["layout"] in change["command"]


def test_pretended_world_is_closed() -> None:
    """A second pretended world can follow. No real process group is left."""
    for rank in (0, 5):
        with World.pretend(6, rank) as world:
            assert (world.rank, world.size, torch.distributed.get_world_size()) == (rank, 6, 6)
    assert not torch.distributed.is_initialized()
    with pytest.raises(UsageError, match="rank"), World.pretend(2, 2):
        pass


def test_adafactor_takes_one_parameter_at_a_time() -> None:
    """It is the only optimizer of torch that does not update all parameters at once on a GPU."""
    for optimizer_kind, is_at_once in ((torch.optim.Adafactor, False), (torch.optim.AdamW, True)):
        optimizer = optimizer_kind(nn.Linear(2, 2).parameters())
        take_all_at_once(optimizer)
        assert (optimizer.param_groups[0]["foreach"] is True) == is_at_once


def test_bubbles_by_schedule() -> None:
    """Interleaving and zero-bubble wait less."""
    idle_shares = [
        traced._idle_share(parse_layout(f"pipeline:microbatches=4{schedule}"), 4)
        for schedule in ("", ",schedule=gpipe", ",schedule=interleaved,chunks=3", ",schedule=zero-bubble")
    ]
    assert idle_shares == [3 / 7, 3 / 7, 1 / 5, pytest.approx(1 / 5)]


def test_gpu_trace_uses_fused_kernels() -> None:
    """RMSNorm keeps its input and one number per row. The optimizer updates all parameters at once."""
    layout = parse_layout("single:precision=bf16")
    cpu_step, gpu_step = (trace_step(decoder(), layout, 1, on_gpu=on_gpu) for on_gpu in (False, True))
    names = [operator.name for operator in gpu_step.operators]
    num_norms = 2 * BLOCKS + 1
    assert (names.count("rms_norm"), names.count("rms_norm_backward")) == (num_norms, num_norms)
    assert any(name.startswith("_foreach_addcdiv") for name in names)
    assert len(names) < 0.7 * len(cpu_step.operators)
    bytes_of_activation = 64 * LENGTH * WIDTH * 4  # one tensor of activations
    assert gpu_step.categories["activations"] < cpu_step.categories["activations"] - num_norms * bytes_of_activation / 2
    assert any(operator.is_half for operator in gpu_step.operators if operator.flops)
