"""The closed forms of `everyrank plan`: memory, step time, the choice of a layout, and invalid arguments."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from everyrank.cli import main
from everyrank.errors import UsageError
from everyrank.layout import parse_layout
from everyrank.plan import traced
from everyrank.plan.calibration import fit_calibration, read_calibration, row_seconds, shipped_calibration
from everyrank.plan.candidates import (
    configure_layout,
    default_batch,
    enumerate_layouts,
    estimate,
    find_best,
    smallest_change,
)
from everyrank.plan.changes import smaller_layouts
from everyrank.plan.configuration import STACKS, make_configurations
from everyrank.plan.decoder import DECODERS, decoder_from_config, parse_decoder
from everyrank.plan.hardware import GIB, GPUS, find_gpu, host_cluster, parse_bytes, parse_cluster, parse_link
from everyrank.plan.memory import predict_memory
from everyrank.plan.rows import read_rows
from everyrank.plan.step_time import PRIOR, Fitted, collective_seconds, predict_step
from everyrank.plan.validate import validate_rows
from everyrank.report.plan import _count, _seconds
from processes import refusal_message

ROWS = Path(__file__).parent / "rows.json"


def test_gpu_table_is_plausible() -> None:
    """Each GPU has a source, and values of the right order of magnitude. GPUs have several spellings."""
    for gpu in GPUS.values():
        assert gpu.source
        assert 10 * GIB < gpu.memory < 300 * GIB
        assert gpu.flops > gpu.flops_tf32 >= 0.4 * gpu.flops_fp32 > 0
        assert gpu.flops_fp8 in (0, pytest.approx(2 * gpu.flops, rel=0.02))
        assert gpu.inside.bandwidth > 0
    assert find_gpu("H100").name == find_gpu("h100_sxm").name == "h100_80gb"
    assert find_gpu("NVIDIA-A100-40GB").name == "a100_40gb"
    assert find_gpu("a100_sxm4_80gb").name == "a100_80gb"
    assert find_gpu("h100_sxm5_80gb").name == find_gpu("h100_sxm").name
    assert find_gpu("h200_141gb").name == "h200"
    with pytest.raises(UsageError, match="h100"):
        find_gpu("h100_7gb")


@pytest.mark.parametrize(
    ("device_name", "kind"),
    [
        ("Tesla T4", "t4"),
        ("Tesla V100-SXM2-16GB", "v100_16gb"),
        ("NVIDIA A10G", "a10g"),
        ("NVIDIA A100-SXM4-80GB", "a100_80gb"),
        ("NVIDIA A100-PCIE-40GB", "a100_40gb_pcie"),
        ("NVIDIA H100 80GB HBM3", "h100_80gb"),
        ("NVIDIA H200 NVL", "h200_nvl"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA RTX A6000", "a6000"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx6000ada"),
        ("AMD Instinct MI300X", "mi300x"),
    ],
)
def test_name_that_cuda_reports_is_known(device_name: str, kind: str) -> None:
    """`plan --calibrate` writes this name, and --calibration looks it up."""
    assert host_cluster(device_name, 1).gpu.name == kind


def test_known_decoders_have_their_published_parameter_counts() -> None:
    """The parameter counts of Llama 3 and GPT-2 are published."""
    assert DECODERS["8b"].parameters == pytest.approx(8.03e9, rel=0.001)
    assert DECODERS["70b"].parameters == pytest.approx(70.55e9, rel=0.001)
    assert DECODERS["405b"].parameters == pytest.approx(405.85e9, rel=0.001)
    assert DECODERS["124m"].parameters == pytest.approx(124.4e6, rel=0.002)


@functools.cache
def errors_of_published_rows() -> dict[str, Any]:
    """Return how far the predictions are from the measured rows."""
    return validate_rows(read_rows(ROWS)[0], [], shipped_calibration())


def test_memory_of_published_rows_is_predicted() -> None:
    """The error is below 1% for allocated bytes of SimuMax, and below 6% for reserved bytes of torchtitan."""
    memory_errors = errors_of_published_rows()["memory"]
    largest_errors = {row["source"]: row["largest_error"] for row in memory_errors}
    assert largest_errors["MooreThreads/SimuMax"] < 0.01
    assert largest_errors["pytorch/torchtitan"] < 0.06


def test_no_row_has_a_false_verdict() -> None:
    """No row that ran out of memory is predicted to fit. No row that ran is predicted not to fit."""
    rows, _ = read_rows(ROWS)
    verdicts = errors_of_published_rows()["verdicts"]
    assert sum(row.ran_out for row in rows) == 4
    assert verdicts["false_fits"] == 0
    assert verdicts["false_does_not_fit"] == 0
    assert verdicts["ran_fits"] > 0


def test_unreadable_rows_are_counted(tmp_path: Path) -> None:
    """Each unreadable row has a reason. No row is dropped without a report."""
    _, unreadable = read_rows(ROWS)
    assert unreadable == [("bigscience-topo-01", "model.layers is missing")]
    valid_row = json.loads(ROWS.read_text())[0]
    invalid_rows: list[Any] = [valid_row | {"measured": {"step_ms": step_ms}} for step_ms in (-1, float("nan"), "fast")]
    invalid_rows += [5, None, {}, {"id": "x", "model": {"hidden": "many"}}, {"model": [], "hardware": 3}]
    (tmp_path / "odd.json").write_text(json.dumps(invalid_rows))
    rows, unreadable = read_rows(tmp_path / "odd.json")
    assert not rows
    assert len(unreadable) == len(invalid_rows)
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(UsageError, match="JSON"):
        read_rows(tmp_path / "bad.json")


def configuration(stack: str = "everyrank-fsdp", **degrees: Any) -> Any:
    """Return the configuration of a Llama 3 8B model on 8 GPUs with a framework."""
    return make_configurations(DECODERS["8b"], STACKS[stack], {"zero": 3, "shard": 8, "micro": 1} | degrees)


def test_memory_decreases_with_sharding_and_recomputation() -> None:
    """More shards, tensor parallelism, context parallelism and recomputation reduce memory.

    Larger micro-batches increase it. The categories add up to the allocated bytes.
    """

    def allocated_bytes(**degrees: Any) -> float:
        return float(predict_memory(configuration(**degrees)).allocated)

    assert allocated_bytes(shard=64) < allocated_bytes(shard=8) < allocated_bytes(shard=1)
    assert allocated_bytes(recompute=1) < allocated_bytes()
    assert allocated_bytes(micro=2) > allocated_bytes()
    assert allocated_bytes(context=8) < allocated_bytes()
    assert allocated_bytes(tensor=8) < allocated_bytes()
    memory = predict_memory(configuration(pipeline=np.array([1, 2, 4, 8]), accumulate=8))
    assert np.allclose(sum(memory.categories.values()), memory.allocated)
    assert (memory.high > memory.device).all()
    assert (memory.device > memory.reserved).all()
    assert (memory.low < memory.allocated).all()


def test_model_has_to_fit_unsharded_unless_it_is_built_on_meta() -> None:
    """Without meta=true each rank holds all parameters while the model is built."""
    sizes, cluster, calibration = DECODERS["70b"], parse_cluster("1024xh100"), shipped_calibration()
    layout_text = "fsdp:precision=bf16,recompute"
    built_unsharded, built_on_meta = (
        estimate(configure_layout(parse_layout(layout), sizes, cluster, 1024), cluster, calibration)
        for layout in (layout_text, f"{layout_text},meta=true")
    )
    assert built_unsharded.verdict == "does not fit"
    assert float(built_unsharded.memory.allocated) > 4 * sizes.parameters * 0.99
    assert built_on_meta.verdict == "fits"
    change = smallest_change(parse_layout(layout_text), sizes, cluster, 1024, calibration)
    assert change is not None
    assert change[1] == f"{layout_text},meta=true"


@pytest.mark.parametrize(
    ("layout", "traced_mib"),
    [
        ("ddp:precision=bf16", 3188),
        ("local_sgd:precision=bf16", 4645),
        ("fsdp:precision=bf16,reshard_after_forward=false", 1521),
        ("fsdp:precision=bf16,recompute,reshard_after_forward=false", 888),
        ("pipeline:precision=bf16,schedule=gpipe", 2257),
        ("tensor:precision=bf16,sequence=true", 2195),
        ("fsdp:tensor=2,sequence=true,precision=bf16", 1658),
        ("fsdp:tensor=4,sequence=true,precision=bf16", 1800),
    ],
)
def test_memory_matches_the_trace_of_our_decoder(layout: str, traced_mib: float) -> None:
    """The peak of `trace_layout(..., on_gpu=True)` on 4 ranks with 8 samples is inside the stated uncertainty."""
    sizes = parse_decoder("layers=8,hidden=1024,heads=8,ffn=2816,vocab=8192,seq=1024")
    memory = predict_memory(configure_layout(parse_layout(layout), sizes, parse_cluster("4xh100"), 8))
    assert 0.93 * traced_mib < float(memory.allocated) / 2**20 < 1.15 * traced_mib


def test_time_counts_the_gathers_and_averages_of_a_layout() -> None:
    """Parameters that stay gathered are gathered once. Local SGD averages less often than DDP reduces gradients."""
    sizes, cluster = DECODERS["1b"], parse_cluster("16xa100", link=parse_link("5Gb"))

    def data_link(layout: str) -> float:
        configuration_of_layout = configure_layout(parse_layout(f"{layout},precision=bf16"), sizes, cluster, 16)
        step_time = predict_step(configuration_of_layout, cluster.gpu, cluster.inside, cluster.across)
        return float(step_time.parts["data link"])

    assert data_link("fsdp:reshard_after_forward=false") < 0.8 * data_link("fsdp:reshard_after_forward=true")
    assert data_link("local_sgd:every=8") == pytest.approx(data_link("local_sgd:every=1") / 8)
    assert data_link("local_sgd:every=8") < data_link("ddp:bucket_mb=25") < data_link("local_sgd:every=1")


@pytest.mark.parametrize("layout", ["ddp:compress=powersgd", "single:devices=2", "local_sgd:simulated=4"])
def test_options_that_the_closed_form_does_not_know_are_refused(layout: str) -> None:
    """A prediction without them would be that of a different layout."""
    with pytest.raises(UsageError, match="not supported for a decoder"):
        configure_layout(parse_layout(layout), DECODERS["1b"], parse_cluster("8xh100"), 8)


def test_gpipe_keeps_activations_of_more_micro_batches() -> None:
    """1F1B keeps the activations of as many micro-batches as there are stages. GPipe keeps all of them."""
    degrees = {"zero": 0, "shard": 1, "pipeline": 4, "accumulate": 32}
    memory_1f1b, memory_gpipe = (
        predict_memory(configuration("megatron", **degrees, schedule=schedule)) for schedule in (0, 1)
    )
    assert float(memory_gpipe.categories["activations"]) > 7 * float(memory_1f1b.categories["activations"])


def test_step_time_is_the_sum_of_its_parts_and_grows_with_slower_hardware() -> None:
    """A slower network, GPU or host makes a step slower. A step is never faster than its FLOPs allow."""
    cluster = parse_cluster("64xh100")
    sharded_configuration = configuration(shard=64)

    def step_seconds(fitted: Fitted = PRIOR, network: str = "400Gb") -> float:
        step_time = predict_step(sharded_configuration, cluster.gpu, cluster.inside, parse_link(network), fitted)
        assert float(step_time.total) == pytest.approx(sum(float(part) for part in step_time.parts.values()))
        return float(step_time.total)

    assert step_seconds(network="10Gb") > 2 * step_seconds()
    assert step_seconds(Fitted(matmul=0.35)) > 1.5 * step_seconds(Fitted(matmul=0.7))
    assert step_seconds(Fitted(launch=1e-3)) > 2 * step_seconds()
    # A step cannot be faster than its FLOPs at the peak rate.
    assert step_seconds(Fitted(1.0, 1.0, 1e-6)) > DECODERS["8b"].flops_per_token * 8192 / cluster.gpu.flops


def test_float32_matrix_products_do_not_use_tf32() -> None:
    """torch does not use TF32 by default. An A100 has an eighth of its TF32 rate then, and a V100 has no TF32."""
    sizes = parse_decoder("1b")
    for gpu_name, factor in (("a100", 8.0), ("v100", 1.0)):
        cluster = parse_cluster(f"8x{gpu_name}")
        default_configuration = configure_layout(parse_layout("fsdp:meta=true"), sizes, cluster, 8)
        product_times = [
            predict_step(replace(default_configuration, tf32=tf32), cluster.gpu, cluster.inside, cluster.across).parts[
                "matrix products"
            ]
            for tf32 in (default_configuration.tf32, 1.0)
        ]
        assert float(product_times[0] / product_times[1]) == pytest.approx(factor, rel=0.05)


def test_group_inside_a_node_does_not_use_the_network() -> None:
    """The time of a group inside a node does not depend on the network between nodes."""
    cluster = parse_cluster("64xh100")
    inside_seconds = [
        float(collective_seconds("all_reduce", 1e9, 8, 8, cluster.inside, parse_link(bandwidth)))
        for bandwidth in ("1Gb", "400Gb")
    ]
    assert inside_seconds[0] == inside_seconds[1]
    across_seconds = float(collective_seconds("all_reduce", 1e9, 8, 1, cluster.inside, parse_link("1Gb")))
    assert across_seconds > 10 * inside_seconds[0]
    assert float(collective_seconds("all_reduce", 1e9, 1, 1, cluster.inside, cluster.across)) == 0


def test_zero_bubble_and_interleaving_shrink_the_bubble() -> None:
    """GPipe has the same bubble as 1F1B."""
    cluster = parse_cluster("8xh100")
    degrees = {"zero": 0, "shard": 1, "pipeline": 8, "accumulate": 8}

    def bubble(**options: Any) -> float:
        pipeline_configuration = configuration("everyrank-autocast", **degrees, **options)
        return float(predict_step(pipeline_configuration, cluster.gpu, cluster.inside, cluster.across).parts["bubble"])

    assert bubble(schedule=2) < 0.5 * bubble()
    assert bubble(chunks=2) < 0.6 * bubble()
    assert bubble(schedule=1) == bubble()


def test_fit_recovers_the_calibration_that_generated_the_rows() -> None:
    """The step times of the rows come from the formula itself. The fit predicts them within 4%."""
    rows, _ = read_rows(ROWS)
    foundry_rows = [row for row in rows if row.stack.name == "llm-foundry"]
    import dataclasses

    from everyrank.plan.calibration import Calibration

    true_calibration = Calibration({row.case: Fitted(0.5, 0.55, 9e-6) for row in foundry_rows})
    generated_rows = [
        dataclasses.replace(row, step_seconds=float(seconds))
        for row, seconds in zip(foundry_rows, row_seconds(foundry_rows, true_calibration), strict=True)
    ]
    fitted_calibration = fit_calibration(generated_rows)
    relative_errors = (
        row_seconds(generated_rows, fitted_calibration) / np.array([row.step_seconds for row in generated_rows]) - 1
    )
    assert np.abs(relative_errors).max() < 0.04
    assert fitted_calibration.fits[generated_rows[0].case].matmul == pytest.approx(0.5, rel=0.05)


def test_prediction_interval_is_wider_for_cases_with_few_rows() -> None:
    """A case with fewer than 16 rows has a wider interval. A case without rows has the widest."""
    calibration = shipped_calibration()
    width_of_many_rows = calibration.half_width("a100_80gb", "llm-foundry")
    width_of_few_rows = calibration.half_width("b200", "megatron-te")
    assert width_of_many_rows < width_of_few_rows <= calibration.half_width("mi300x", "everyrank")


def test_layout_text_is_parsed_to_the_same_layout() -> None:
    """The text of a layout is parsed to the same degrees and the same memory."""
    sizes, cluster = DECODERS["8b"], parse_cluster("64xh100")
    columns = enumerate_layouts(sizes, cluster, 128)
    assert columns is not None
    from everyrank.plan.candidates import layout_text

    seen_strategies: set[str] = set()
    for index in range(0, len(columns), 17):
        written_text = layout_text(columns, index)
        parsed_configuration = configure_layout(parse_layout(written_text), sizes, cluster, 128)
        written_configuration = columns.take(np.array([index]))
        for name in (
            "tensor",
            "pipeline",
            "replicate",
            "shard",
            "context",
            "micro",
            "accumulate",
            "recompute",
            "whole_first",
        ):
            assert float(getattr(parsed_configuration, name)) == float(np.max(getattr(written_configuration, name))), (
                written_text,
                name,
            )
        assert float(predict_memory(parsed_configuration).allocated) == pytest.approx(
            float(np.max(predict_memory(written_configuration).allocated))
        ), written_text
        seen_strategies.add(written_text.partition(":")[0])
    assert seen_strategies >= {"fsdp", "pipeline"}


@pytest.mark.parametrize(
    "layout", ["fsdp", "ddp", "fsdp:precision=bf16", "pipeline:pipeline=8,replicate=8,microbatches=2"]
)
def test_smallest_change_of_a_layout_fits(layout: str) -> None:
    """The proposed layout is different and fits into memory."""
    sizes, cluster, calibration = DECODERS["8b"], parse_cluster("64xh100"), shipped_calibration()
    change = smallest_change(parse_layout(layout), sizes, cluster, 128, calibration)
    assert change is not None
    assert change[1] != layout
    changed_configuration = configure_layout(parse_layout(change[1]), sizes, cluster, 128)
    assert estimate(changed_configuration, cluster, calibration).verdict == "fits"


def test_changes_of_a_layout_are_tried_from_small_to_large() -> None:
    """Later changes keep meta=true. Changes that the layout does not support are left out."""

    def changes(layout: str, **options: Any) -> list[tuple[str, str]]:
        smaller = smaller_layouts(parse_layout(layout), True, (2, 4), (1, 4), **options)
        return [(change, str(changed)) for change, changed in smaller]

    assert changes("single") == [
        ("bf16", "single:precision=bf16"),
        ("recompute", "single:recompute"),
        ("micro-batches 1/2 as large", "single:accumulate=2"),
        ("micro-batches 1/4 as large", "single:accumulate=4"),
        ("bf16, recompute", "single:precision=bf16,recompute"),
        ("bf16, recompute, micro-batches 1/4 as large", "single:accumulate=4,precision=bf16,recompute"),
    ]
    assert changes("fsdp:recompute,precision=bf16", meta=True)[:2] == [
        ("meta=true", "fsdp:precision=bf16,recompute,meta=true"),
        ("meta=true, micro-batches 1/2 as large", "fsdp:accumulate=2,precision=bf16,recompute,meta=true"),
    ]
    static_graph = changes("ddp:static_graph")
    assert [change for change, _ in static_graph] == ["bf16", "recompute", "bf16, recompute"]
    cluster = parse_cluster("8xa100")
    assert smallest_change(parse_layout("ddp:static_graph"), DECODERS["8b"], cluster, 16, shipped_calibration())


def test_best_layout_is_the_fastest_that_fits() -> None:
    """The vectorized search finds the same layouts as a loop over all layouts."""
    sizes, cluster, calibration = DECODERS["1b"], parse_cluster("8xa100"), shipped_calibration()
    best_estimates, num_fitting, num_layouts = find_best(sizes, cluster, 16, calibration)
    columns = enumerate_layouts(sizes, cluster, 16)
    assert columns is not None
    assert num_layouts == len(columns)
    estimates = [estimate(columns.take(index), cluster, calibration, "x") for index in range(len(columns))]
    fitting_seconds = [estimated.seconds for estimated in estimates if estimated.verdict == "fits"]
    assert len(fitting_seconds) == num_fitting
    assert best_estimates[0].seconds == pytest.approx(min(fitting_seconds))
    assert all(estimated.seconds <= 1.05 * best_estimates[0].seconds for estimated in best_estimates)


INVALID_ARGUMENTS = [
    ("--decoder 8b", "--gpus"),
    ("--decoder 8b --gpus 8xh1000", "h100"),
    ("--decoder 8b --gpus 0xh100", "0 GPUs"),
    ("--decoder 8b --gpus h100", "64xh100"),
    ("--decoder 8b --gpus 99999999xh100", "at most"),
    ("--decoder 8b --gpus 12xh100", "nodes of 8"),
    ("--decoder 8 --gpus 8xh100", "8b"),
    ("--decoder hidden=12 --gpus 8xh100", "layers"),
    ("--decoder layers=2,hidden=10,heads=3 --gpus 8xh100", "heads"),
    ("--decoder layers=2,hidden=-8,heads=1 --gpus 8xh100", "whole number"),
    ("--decoder 8b,layer=3 --gpus 8xh100", "layers"),
    ("--decoder 8b --gpus 8xh100 --memory much", "80GiB"),
    ("--decoder 8b --gpus 8xh100 --link fast", "400Gb"),
    ("--decoder 8b --gpus 8xh100 --link 400gb", "did you mean 400Gb"),
    ("--decoder 8b --gpus 8xh100 --link nan", "400Gb"),
    ("--decoder 8b --gpus 8xhh100", "did you mean h100"),
    ("--decoder 8b --gpus -8xh100", "--gpus"),
    ("--decoder 8b --gpus 99999999999999999999999xh100", "at most"),
    ("--decoder 8bb --gpus 8xh100", "did you mean 8b"),
    ("--decoder layers=nan,hidden=8,heads=1 --gpus 8xh100", "whole number"),
    ("--decoder 8b --gpus 8xh100 --layout fsdp:tensr=2", "did you mean tensor"),
    ("--decoder 8b --gpus 8xh100 --price nan", "above 0"),
    ("--decoder 8b --gpus 8xh100 --price -1", "above 0"),
    ("--decoder 8b --gpus 8xh100 --mtbf inf", "above 0"),
    ("--decoder 1b --gpus 64xh100 --tokens 1T --mtbf 0.1", "no progress"),
    ("--decoder 8b --gpus 8xh100 --tokens nan", "above 0"),
    ("--decoder 8b --gpus 8xh100 --tokens 1e400", "above 0"),
    ("--decoder 8b --gpus 8xh100 --memory nan", "80GiB"),
    ("--decoder 8b --gpus 8xh100 --per-node -1", "at least 1"),
    ("--decoder 8b --gpus 8xh100 --seq -4", "at least 1"),
    ("--decoder 8b --gpus 8xh100 --backend shm", "--calibrate"),
    ("txt --gpus 2xh100", "did you mean text"),
    ("--decoder 8b --gpus 8xh100 --link none.json", "comm"),
    ("--decoder 8b --gpus 8xh100 --layout fsdpp", "fsdp"),
    ("--decoder 8b --gpus 8xh100 --layout fsdp:tensor=3", "3"),
    ("--decoder 8b --gpus 8xh100 --batch 0", "at least 1"),
    ("--decoder 8b --gpus 8xh100 --batch 7 --layout fsdp", "--batch 8"),
    ("--decoder 8b --gpus 8xh100 --tokens lots", "1T"),
    ("--gpus 8xh100", "--decoder"),
    ("missing.json --gpus 8xh100", "missing.json"),
    ("--validate missing.json", "missing.json"),
]


@pytest.mark.parametrize(("args", "expected_text"), INVALID_ARGUMENTS, ids=[args for args, _ in INVALID_ARGUMENTS])
def test_invalid_arguments_are_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], args: str, expected_text: str
) -> None:
    """The exit code is 2. The error names a valid value or the invalid part."""
    assert main(["plan", *args.split()]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert expected_text in lines[0]


def test_default_batch_divides_among_the_gpus() -> None:
    """16 million tokens are 2048 samples, of which 1536 GPUs get one each. More GPUs share the samples."""
    sizes = DECODERS["8b"]
    assert [default_batch(sizes, gpus) for gpus in (1, 64, 1024, 1536, 16384)] == [2, 128, 2048, 1536, 2048]


def test_commands_of_one_process_start_one_process(tmp_path: Path) -> None:
    """`train --layout single --processes 8` is refused, so `plan` prints one process."""
    args = ["plan", "--decoder", "124m", "--gpus", "16xh100", "--batch", "1", "--layout", "single:precision=bf16"]
    assert main([*args, "--json", str(tmp_path / "plan.json")]) == 0
    commands = json.loads((tmp_path / "plan.json").read_text())["shortlist"][0]["commands"]
    assert all(command.endswith("--batch 1 --processes 1") for command in commands.values())
    cluster = parse_cluster("16xh100")
    assert traced._command("single", "w.py", cluster).endswith("--layout single --processes 1")
    custom_path = tmp_path / "my parallel.py"
    custom_path.write_text("")
    assert f"--layout '{custom_path}:tensor=2'" in traced._command(f"{custom_path}:tensor=2", "w.py", cluster)


def test_vocabulary_of_ten_million_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    """The logits of such a model do not fit into memory."""
    assert main(["plan", "--decoder", "8b,vocab=10000000", "--gpus", "8xh100"]) == 0
    assert "does not fit" in capsys.readouterr().out


def test_hugging_face_config_is_read(tmp_path: Path) -> None:
    """Mixtures of experts and encoders are refused, because the formula does not cover them."""
    config = {"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8}
    config |= {"intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 131072}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert decoder_from_config(path) == DECODERS["8b"]
    for unsupported_fields in ({"num_local_experts": 8}, {"is_encoder_decoder": True}, {"hidden_size": "wide"}):
        path.write_text(json.dumps(config | unsupported_fields))
        with pytest.raises(UsageError):
            decoder_from_config(path)
    path.write_text("[" * 100000)
    with pytest.raises(UsageError, match="JSON"):
        decoder_from_config(path)


@pytest.mark.parametrize(
    ("config", "billions"),
    [
        # parameters as on the pages of the models
        (
            {"model_type": "gemma", "num_hidden_layers": 18, "hidden_size": 2048, "num_attention_heads": 8,
             "num_key_value_heads": 1, "head_dim": 256, "intermediate_size": 16384, "vocab_size": 256000},
            2.506,
        ),
        (
            {"model_type": "falcon", "num_hidden_layers": 32, "hidden_size": 4544, "num_attention_heads": 71,
             "num_kv_heads": 71, "multi_query": True, "new_decoder_architecture": False, "vocab_size": 65024},
            6.92,
        ),
        (
            {"model_type": "falcon", "num_hidden_layers": 60, "hidden_size": 8192, "num_attention_heads": 128,
             "num_kv_heads": 8, "multi_query": True, "new_decoder_architecture": True, "vocab_size": 65024},
            41.3,
        ),
        (
            {"model_type": "gpt_bigcode", "n_layer": 40, "n_embd": 6144, "n_head": 48, "n_inner": 24576,
             "n_positions": 8192, "multi_query": True, "vocab_size": 49152},
            15.5,
        ),
        (
            {"model_type": "bloom", "n_layer": 30, "hidden_size": 4096, "num_attention_heads": 32,
             "vocab_size": 250880},
            7.07,
        ),
        (
            {"model_type": "starcoder2", "num_hidden_layers": 30, "hidden_size": 3072, "num_attention_heads": 24,
             "num_key_value_heads": 2, "intermediate_size": 12288, "vocab_size": 49152},
            3.03,
        ),
    ],
)  # fmt: skip
def test_config_of_other_decoders_has_their_parameters(tmp_path: Path, config: dict[str, Any], billions: float) -> None:
    """Key-value heads, gates and tied heads are named differently, or follow from the type of the model."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert decoder_from_config(path).parameters == pytest.approx(billions * 1e9, rel=0.02)


@pytest.mark.parametrize(
    ("fields", "expected_text"),
    [
        ({"model_type": "bert"}, "is an encoder"),
        ({"model_type": "dbrx", "ffn_config": {"moe_num_experts": 16}}, "mixtures of experts"),
        ({"model_type": "bamba", "mamba_d_state": 128}, "layers without attention"),
    ],
)
def test_config_of_a_model_that_is_not_a_dense_decoder_is_refused(
    tmp_path: Path, fields: dict[str, Any], expected_text: str
) -> None:
    """Its numbers would be those of a different model."""
    config = {"num_hidden_layers": 12, "hidden_size": 768, "num_attention_heads": 12, "vocab_size": 30522}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config | fields))
    with pytest.raises(UsageError, match=expected_text):
        decoder_from_config(path)


def test_large_numbers_have_no_exponent() -> None:
    assert [_count(value) for value in (12, 999.7, 999_700, 1.3e6)] == ["12", "1,000", "1,000 k", "1.3 M"]
    assert _seconds(0.9998) == "1,000 ms"


def test_plan_writes_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each layout has a verdict. A layout that does not fit has a change or a reason.

    The shortlist has commands, and the whole run has its cost.
    """
    json_path = tmp_path / "plan.json"
    args = ["plan", "--decoder", "8b", "--gpus", "64xh100", "--tokens", "1T", "--price", "2", "--mtbf", "24", "--json"]
    assert main([*args, str(json_path)]) == 0
    plan = json.loads(json_path.read_text())
    assert all(row["verdict"] == "fits" or "change" in row or "reason" in row for row in plan["layouts"])
    for choice in plan["shortlist"]:
        assert choice["low_seconds"] < choice["step_seconds"] < choice["high_seconds"]
        assert choice["layout"] in choice["commands"]["train"]
        assert choice["most_bytes"] <= plan["cluster"]["memory_bytes"]
    whole_run = plan["whole_run"]
    assert 0 < whole_run["goodput"] < 1
    assert whole_run["money"] == pytest.approx(2 * whole_run["gpu_hours"])
    assert len(whole_run["assumptions"]) >= 4
    assert len(plan["shortlist"]) == 3
    assert not plan["is_ranked"]
    assert "Not ranked" in capsys.readouterr().out


def test_only_predictions_within_5_percent_are_a_tie(capsys: pytest.CaptureFixture[str]) -> None:
    """Layouts that the user requests may be further apart. Otherwise only such close ones are in the shortlist."""
    args = ["plan", "--decoder", "8b", "--gpus", "8xh100", "--batch", "16", "--layout"]
    layouts = ["fsdp:precision=bf16,recompute", "fsdp:tensor=8,accumulate=4,precision=bf16,recompute"]
    assert main([*args, *layouts]) == 0
    output = capsys.readouterr().out
    assert "2 fastest, by prediction" in output
    assert "A tie" not in output
    assert main([*args, layouts[0], layouts[0] + ",meta=true"]) == 0
    assert "A tie of 2" in capsys.readouterr().out


@pytest.mark.integration
def test_validate_reports_errors_by_source(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The result has errors of time and memory, and the number of unreadable rows.

    Rows of the fit are left out of the fit that predicts them.
    """
    errors_path, calibration_path = tmp_path / "errors.json", tmp_path / "fitted.json"
    args = ["plan", "--validate", str(ROWS), "--calibration", str(ROWS), "--json", str(errors_path)]
    assert main([*args, "--write-calibration", str(calibration_path)]) == 0
    result = json.loads(errors_path.read_text())
    assert result["unreadable"] == [{"reason": "model.layers is missing", "count": 1}]
    assert {row["source"] for row in result["time"]} >= {"mosaicml/llm-foundry", "MooreThreads/SimuMax"}
    assert result["left_out_of_fit"] == sum(row["rows"] for row in result["time"])
    assert result["resamplings"]["draws"] == 10
    assert "model.layers" in capsys.readouterr().out
    assert read_calibration(calibration_path).rows == read_calibration(ROWS).rows


def test_plan_of_a_decoder_does_not_import_torch() -> None:
    """A plan of a decoder takes less time than the import of torch."""
    code = (
        "import sys\nfrom everyrank.cli import main\n"
        "assert main('plan --decoder 8b --gpus 64xh100'.split()) == 0\nprint('torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.splitlines()[-1] == "False"


def test_sizes_with_units_are_parsed() -> None:
    """Bytes, bandwidths and decoder sizes are typed with units."""
    assert parse_bytes("80GiB", "--memory") == 80 * GIB
    assert parse_bytes("80GB", "--memory") == 80e9
    assert parse_bytes("80", "--memory") == 80 * GIB
    assert parse_link("400Gb").bandwidth == pytest.approx(48e9)
    assert parse_link("50GB").bandwidth == pytest.approx(48e9)
    assert parse_decoder("8b,seq=4096").seq == 4096
    assert parse_decoder("layers=4,hidden=256,heads=4").kv == 4


def test_html_page_draws_memory_and_time(tmp_path: Path) -> None:
    """The page has two charts, no scripts, and loads nothing from the network."""
    html_path = tmp_path / "plan.html"
    assert main(["plan", "--decoder", "8b", "--gpus", "64xh100", "--html", str(html_path)]) == 0
    page = html_path.read_text()
    assert page.count("<svg") == 2
    assert "activations" in page
    assert '<p class="note"></p>' not in page
    assert "<script" not in page
    assert 'src="http' not in page


@pytest.mark.parametrize("option", [["--set", "lr=1"], ["--data", "folder"]])
def test_option_of_a_workload_is_refused_for_a_decoder(option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """It would change nothing."""
    message = refusal_message(capsys, "plan", "--decoder", "8b", "--gpus", "8xh100", *option)
    assert f"{option[0]}: for a workload only" in message
