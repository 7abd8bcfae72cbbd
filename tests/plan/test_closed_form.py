"""The closed forms of `everyrank plan`: memory against published figures, properties of time, choice, hostile input."""

from __future__ import annotations

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
from everyrank.plan.calibration import fit_calibration, read_calibration, row_seconds, shipped_calibration
from everyrank.plan.candidates import configure_layout, enumerate_layouts, estimate, find_best, smallest_change
from everyrank.plan.configuration import STACKS, make_configurations
from everyrank.plan.decoder import DECODERS, decoder_from_config, parse_decoder
from everyrank.plan.hardware import GIB, GPUS, find_gpu, parse_bytes, parse_cluster, parse_link
from everyrank.plan.memory import predict_memory
from everyrank.plan.rows import read_rows
from everyrank.plan.step_time import PRIOR, Fitted, collective_seconds, predict_step
from everyrank.plan.validate import validate_rows

ROWS = Path(__file__).parent / "rows.json"


def test_facts_of_gpu_kinds() -> None:
    """Each has a source, and sizes of the right order."""
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


def test_known_decoders_have_their_published_parameters() -> None:
    """Llama 3's and GPT-2's counts are known."""
    assert DECODERS["8b"].parameters == pytest.approx(8.03e9, rel=0.001)
    assert DECODERS["70b"].parameters == pytest.approx(70.55e9, rel=0.001)
    assert DECODERS["405b"].parameters == pytest.approx(405.85e9, rel=0.001)
    assert DECODERS["124m"].parameters == pytest.approx(124.4e6, rel=0.002)


def test_memory_of_published_rows() -> None:
    """The 4 rows that print allocated bytes come out within 1%, torchtitan's reserved within 6%."""
    rows, _ = read_rows(ROWS)
    table = validate_rows(rows, [], shipped_calibration())["memory"]
    errors = {row["source"]: row["largest_error"] for row in table}
    assert errors["MooreThreads/SimuMax"] < 0.01
    assert errors["pytorch/torchtitan"] < 0.06


def test_no_false_fits() -> None:
    """What ran out of memory is never said to fit, and what ran is never said not to."""
    rows, _ = read_rows(ROWS)
    verdicts = validate_rows(rows, [], shipped_calibration())["verdicts"]
    assert sum(row.ran_out for row in rows) == 4
    assert verdicts["false_fits"] == 0
    assert verdicts["false_does_not_fit"] == 0
    assert verdicts["ran_fits"] > 0


def test_rows_that_cannot_be_read_are_counted(tmp_path: Path) -> None:
    """Each with its reason; none is dropped in silence."""
    _, unreadable = read_rows(ROWS)
    assert unreadable == [("bigscience-topo-01", "model.layers is missing")]
    whole = json.loads(ROWS.read_text())[0]
    odd: list[Any] = [whole | {"measured": {"step_ms": value}} for value in (-1, float("nan"), "fast")]
    odd += [5, None, {}, {"id": "x", "model": {"hidden": "many"}}, {"model": [], "hardware": 3}]
    (tmp_path / "odd.json").write_text(json.dumps(odd))
    rows, unreadable = read_rows(tmp_path / "odd.json")
    assert not rows
    assert len(unreadable) == len(odd)
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(UsageError, match="JSON"):
        read_rows(tmp_path / "bad.json")


def configuration(stack: str = "everyrank-fsdp", **rows: Any) -> Any:
    return make_configurations(DECODERS["8b"], STACKS[stack], {"zero": 3, "shard": 8, "micro": 1} | rows)


def test_memory_moves_as_it_should() -> None:
    """More shards hold less, recomputation keeps less, larger micro-batches keep more; categories add up."""

    def total(**rows: Any) -> float:
        return float(predict_memory(configuration(**rows)).allocated)

    assert total(shard=64) < total(shard=8) < total(shard=1)
    assert total(recompute=1) < total()
    assert total(micro=2) > total()
    assert total(context=8) < total()
    assert total(tensor=8) < total()
    memory = predict_memory(configuration(pipeline=np.array([1, 2, 4, 8]), accumulate=8))
    assert np.allclose(sum(memory.categories.values()), memory.allocated)
    assert (memory.high > memory.device).all()
    assert (memory.device > memory.reserved).all()
    assert (memory.low < memory.allocated).all()


def test_a_model_that_is_built_whole_has_to_fit_whole() -> None:
    """Without meta=true each rank holds all parameters for a moment, whatever it holds afterwards."""
    sizes, cluster, calibration = DECODERS["70b"], parse_cluster("1024xh100"), shipped_calibration()
    text = "fsdp:precision=bf16,recompute"
    whole, parts = (
        estimate(configure_layout(parse_layout(layout), sizes, cluster, 1024), cluster, calibration)
        for layout in (text, f"{text},meta=true")
    )
    assert whole.verdict == "does not fit"
    assert float(whole.memory.allocated) > 4 * sizes.parameters * 0.99
    assert parts.verdict == "fits"
    change = smallest_change(parse_layout(text), sizes, cluster, 1024, calibration)
    assert change is not None
    assert change[1] == f"{text},meta=true"


def test_pipeline_keeps_more_micro_batches_under_gpipe() -> None:
    """1F1B keeps as many as there are stages, GPipe all of them."""
    rows = {"zero": 0, "shard": 1, "pipeline": 4, "accumulate": 32}
    one, all_of_them = (predict_memory(configuration("megatron", **rows, schedule=s)) for s in (0, 1))
    assert float(all_of_them.categories["activations"]) > 7 * float(one.categories["activations"])


def test_time_is_the_sum_of_its_parts_and_moves_as_it_should() -> None:
    """A slower link, chip or CPU never makes a step faster."""
    cluster = parse_cluster("64xh100")
    c = configuration(shard=64)

    def seconds(fitted: Fitted = PRIOR, link: str = "400Gb") -> float:
        time = predict_step(c, cluster.gpu, cluster.inside, parse_link(link), fitted)
        assert float(time.total) == pytest.approx(sum(float(part) for part in time.parts.values()))
        return float(time.total)

    assert seconds(link="10Gb") > 2 * seconds()
    assert seconds(Fitted(matmul=0.35)) > 1.5 * seconds(Fitted(matmul=0.7))
    assert seconds(Fitted(launch=1e-3)) > 2 * seconds()
    # it cannot be faster than its operations
    assert seconds(Fitted(1.0, 1.0, 1e-6)) > DECODERS["8b"].flops_per_token * 8192 / cluster.gpu.flops


def test_float32_products_do_not_use_tf32() -> None:
    """As torch's default has it: on an A100 an eighth of TF32's operations, on a V100 all that it has."""
    sizes = parse_decoder("1b")
    for kind, factor in (("a100", 8.0), ("v100", 1.0)):
        cluster = parse_cluster(f"8x{kind}")
        own = configure_layout(parse_layout("fsdp:meta=true"), sizes, cluster, 8)
        times = [
            predict_step(replace(own, tf32=tf32), cluster.gpu, cluster.inside, cluster.across).parts["products"]
            for tf32 in (own.tf32, 1.0)
        ]
        assert float(times[0] / times[1]) == pytest.approx(factor, rel=0.05)


def test_a_group_crosses_nodes_only_where_it_has_to() -> None:
    """A group inside a node does not feel the network."""
    cluster = parse_cluster("64xh100")
    inside = [
        float(collective_seconds("all_reduce", 1e9, 8, 8, cluster.inside, parse_link(rate)))
        for rate in ("1Gb", "400Gb")
    ]
    assert inside[0] == inside[1]
    slow = float(collective_seconds("all_reduce", 1e9, 8, 1, cluster.inside, parse_link("1Gb")))
    assert slow > 10 * inside[0]
    assert float(collective_seconds("all_reduce", 1e9, 1, 1, cluster.inside, cluster.across)) == 0


def test_zero_bubble_and_interleaving_shrink_the_bubble() -> None:
    cluster = parse_cluster("8xh100")
    rows = {"zero": 0, "shard": 1, "pipeline": 8, "accumulate": 8}

    def bubble(**more: Any) -> float:
        c = configuration("everyrank-autocast", **rows, **more)
        return float(predict_step(c, cluster.gpu, cluster.inside, cluster.across).parts["bubble"])

    assert bubble(schedule=2) < 0.5 * bubble()
    assert bubble(chunks=2) < 0.6 * bubble()
    assert bubble(schedule=1) == bubble()


def test_the_fit_finds_the_numbers_that_made_the_rows() -> None:
    """Rows whose times come out of the formula itself are predicted within 4%, whatever the prior is."""
    rows, _ = read_rows(ROWS)
    foundry = [row for row in rows if row.stack.name == "llm-foundry"]
    import dataclasses

    from everyrank.plan.calibration import Calibration

    true = Calibration({row.case: Fitted(0.5, 0.55, 9e-6) for row in foundry})
    made = [
        dataclasses.replace(row, step_seconds=float(seconds))
        for row, seconds in zip(foundry, row_seconds(foundry, true), strict=True)
    ]
    fitted = fit_calibration(made)
    errors = row_seconds(made, fitted) / np.array([row.step_seconds for row in made]) - 1
    assert np.abs(errors).max() < 0.04
    assert fitted.fits[made[0].case].matmul == pytest.approx(0.5, rel=0.05)


def test_few_rows_get_the_wider_interval() -> None:
    """Below 16 rows the interval of a case is not trusted; where nothing is known it is widest."""
    calibration = shipped_calibration()
    many = calibration.half_width("a100_80gb", "llm-foundry")
    few = calibration.half_width("b200", "megatron-te")
    assert many < few <= calibration.half_width("mi300x", "everyrank")


def test_layouts_are_read_back_as_they_were_written() -> None:
    """What the choice names is a layout that everyrank parses to the same degrees and the same memory."""
    sizes, cluster = DECODERS["8b"], parse_cluster("64xh100")
    columns = enumerate_layouts(sizes, cluster, 128)
    assert columns is not None
    from everyrank.plan.candidates import layout_text

    seen: set[str] = set()
    for index in range(0, len(columns), 17):
        text = layout_text(columns, index)
        again = configure_layout(parse_layout(text), sizes, cluster, 128)
        row = columns.take(np.array([index]))
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
            assert float(getattr(again, name)) == float(np.max(getattr(row, name))), (text, name)
        assert float(predict_memory(again).allocated) == pytest.approx(float(np.max(predict_memory(row).allocated))), (
            text
        )
        seen.add(text.partition(":")[0])
    assert seen >= {"fsdp", "pipeline"}


@pytest.mark.parametrize(
    "layout", ["fsdp", "ddp", "fsdp:precision=bf16", "pipeline:pipeline=8,replicate=8,microbatches=2"]
)
def test_the_smallest_change_fits(layout: str) -> None:
    """What is proposed is not what was asked, and fits."""
    sizes, cluster, calibration = DECODERS["8b"], parse_cluster("64xh100"), shipped_calibration()
    change = smallest_change(parse_layout(layout), sizes, cluster, 128, calibration)
    assert change is not None
    assert change[1] != layout
    c = configure_layout(parse_layout(change[1]), sizes, cluster, 128)
    assert estimate(c, cluster, calibration).verdict == "fits"


def test_the_choice_is_the_fastest_that_fits() -> None:
    """Against a walk over all rows, one by one."""
    sizes, cluster, calibration = DECODERS["1b"], parse_cluster("8xa100"), shipped_calibration()
    best, fitting, looked_at = find_best(sizes, cluster, 16, calibration)
    columns = enumerate_layouts(sizes, cluster, 16)
    assert columns is not None
    assert looked_at == len(columns)
    one_by_one = [estimate(columns.take(index), cluster, calibration, "x") for index in range(len(columns))]
    fits = [one.seconds for one in one_by_one if one.verdict == "fits"]
    assert len(fits) == fitting
    assert best[0].seconds == pytest.approx(min(fits))
    assert all(one.seconds <= 1.05 * best[0].seconds for one in best)


HOSTILE = [
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
    ("--decoder 8b --gpus 8xh100 --price -1", "above 0"),
    ("--gpus 8xh100", "--decoder"),
    ("missing.json --gpus 8xh100", "missing.json"),
    ("--validate missing.json", "missing.json"),
]


@pytest.mark.parametrize(("words", "named"), HOSTILE, ids=[words for words, _ in HOSTILE])
def test_wrong_calls_are_one_line(capsys: pytest.CaptureFixture[str], words: str, named: str) -> None:
    """The line names what to type; exit status 2."""
    assert main(["plan", *words.split()]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert named in lines[0]


def test_a_vocabulary_of_ten_million_is_answered(capsys: pytest.CaptureFixture[str]) -> None:
    """Its logits do not fit, and that is the answer."""
    assert main(["plan", "--decoder", "8b,vocab=10000000", "--gpus", "8xh100"]) == 0
    assert "does not fit" in capsys.readouterr().out


def test_a_config_of_hugging_face(tmp_path: Path) -> None:
    """Sizes as the file has them; mixtures and encoders are refused, as the formula does not know them."""
    config = {"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8}
    config |= {"intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 131072}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert decoder_from_config(path) == DECODERS["8b"]
    for more in ({"num_local_experts": 8}, {"is_encoder_decoder": True}, {"hidden_size": "wide"}):
        path.write_text(json.dumps(config | more))
        with pytest.raises(UsageError):
            decoder_from_config(path)
    path.write_text("[" * 100000)
    with pytest.raises(UsageError, match="JSON"):
        decoder_from_config(path)


def test_the_answer_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every layout has its bytes by category, what does not fit its change, and the shortlist its commands."""
    out = tmp_path / "plan.json"
    words = ["plan", "--decoder", "8b", "--gpus", "64xh100", "--tokens", "1T", "--price", "2", "--mtbf", "24", "--json"]
    assert main([*words, str(out)]) == 0
    answer = json.loads(out.read_text())
    assert all(row["verdict"] == "fits" or "change" in row or "reason" in row for row in answer["layouts"])
    for choice in answer["shortlist"]:
        assert choice["low_seconds"] < choice["step_seconds"] < choice["high_seconds"]
        assert choice["layout"] in choice["commands"]["train"]
        assert choice["most_bytes"] <= answer["cluster"]["memory_bytes"]
    run = answer["whole_run"]
    assert 0 < run["goodput"] < 1
    assert run["money"] == pytest.approx(2 * run["gpu_hours"])
    assert len(run["assumptions"]) >= 4
    assert "A tie" in capsys.readouterr().out or len(answer["shortlist"]) == 1 or not answer["is_ranked"]


def test_validate_prints_each_source(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Time, memory, verdicts, regret, and the rows that were not read; rows of the fit are predicted without them."""
    out, fitted = tmp_path / "errors.json", tmp_path / "fitted.json"
    words = ["plan", "--validate", str(ROWS), "--calibration", str(ROWS), "--json", str(out)]
    assert main([*words, "--write-calibration", str(fitted)]) == 0
    result = json.loads(out.read_text())
    assert result["unreadable"] == [{"reason": "model.layers is missing", "count": 1}]
    assert {row["source"] for row in result["time"]} >= {"mosaicml/llm-foundry", "MooreThreads/SimuMax"}
    assert result["left_out_of_fit"] == sum(row["rows"] for row in result["time"])
    assert result["resamplings"]["draws"] == 10
    assert "model.layers" in capsys.readouterr().out
    assert read_calibration(fitted).rows == read_calibration(ROWS).rows


def test_the_arithmetic_imports_no_torch() -> None:
    """A plan of a decoder takes less time than importing torch."""
    code = (
        "import sys\nfrom everyrank.cli import main\n"
        "assert main('plan --decoder 8b --gpus 64xh100'.split()) == 0\nprint('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "False"


def test_sizes_as_typed() -> None:
    assert parse_bytes("80GiB", "--memory") == 80 * GIB
    assert parse_bytes("80GB", "--memory") == 80e9
    assert parse_bytes("80", "--memory") == 80 * GIB
    assert parse_link("400Gb").bandwidth == pytest.approx(48e9)
    assert parse_link("50GB").bandwidth == pytest.approx(48e9)
    assert parse_decoder("8b,seq=4096").seq == 4096
    assert parse_decoder("layers=4,hidden=256,heads=4").kv == 4


def test_the_page_draws_memory_and_time(tmp_path: Path) -> None:
    """It loads nothing."""
    out = tmp_path / "plan.html"
    assert main(["plan", "--decoder", "8b", "--gpus", "64xh100", "--html", str(out)]) == 0
    text = out.read_text()
    assert text.count("<svg") == 2
    assert "activations" in text
    assert "<script" not in text
    assert 'src="http' not in text
