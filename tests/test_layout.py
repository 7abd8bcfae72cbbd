"""Layout strings: accepted forms, parsed values and error messages."""

from typing import Any

import pytest

from everyrank.errors import LayoutError
from everyrank.layout import STRATEGIES, Layout, parse_layout


@pytest.mark.parametrize(
    "text",
    [
        *STRATEGIES,
        "single:accumulate=4",
        "ddp:accumulate=4,precision=bf16",
        "ddp:replicate=2",
        "ddp:replicate=2,accumulate=3,precision=float64,recompute,compile,find_unused=true",
        "ddp:bucket_mb=25",
        "ddp:bucket_mb=0.5,static_graph=true",
        "ddp:find_unused=false",
        "zero1:replicate=3,precision=fp16",
        "fsdp:shard=2",
        "fsdp:shard=4,recompute,reshard_after_forward=false",
        "parameter_server:servers=2",
        "parameter_server:replicate=2,updates=async,order=seeded",
    ],
)
def test_layout_is_printed_as_it_was_typed(text: str) -> None:
    """A Record names its layout by this text. If a user types it, the layout must be the same."""
    assert str(parse_layout(text)) == text
    assert parse_layout(str(parse_layout(text))) == parse_layout(text)


@pytest.mark.parametrize(
    "text",
    [
        "ddp:bucket_mb=0.1234567891",  # %g keeps six digits
        "ddp:bucket_mb=1234567.5",
        "ddp:precision=float32,accumulate=1",  # defaults are left out
        "ddp:recompute=false,compile=no",
        "ddp:recompute=yes,compile=1",
        "fsdp:reshard_after_forward=0",
        "fsdp:reshard_after_forward",
        "ddp:static_graph,find_unused",
    ],
)
def test_printed_layout_parses_to_the_same_layout(text: str) -> None:
    """The printed text may differ from the typed text, but must mean the same layout."""
    layout = parse_layout(text)
    assert parse_layout(str(layout)) == layout


@pytest.mark.parametrize("option", ["recompute", "recompute=true", "recompute=True", "recompute=yes", "recompute=1"])
def test_forms_of_true(option: str) -> None:
    """A key without a value means true, as do the usual words for it."""
    assert parse_layout(f"fsdp:{option}") == Layout("fsdp", recompute=True)


@pytest.mark.parametrize("option", ["recompute=false", "recompute=False", "recompute=no", "recompute=0"])
def test_forms_of_false(option: str) -> None:
    """`bool("false")` is True, so the text must be parsed, not converted."""
    assert parse_layout(f"fsdp:{option}") == Layout("fsdp", recompute=False)


def test_values_have_the_type_of_their_key() -> None:
    """A number that stays a string would be compared and multiplied as a string."""
    layout = parse_layout("ddp:replicate=2,accumulate=4,precision=bf16,recompute,compile,bucket_mb=12.5,find_unused")
    assert layout.strategy == "ddp"
    assert layout.degrees == {"replicate": 2}
    assert layout.accumulate == 4
    assert layout.precision == "bf16"
    assert layout.recompute is True
    assert layout.compile is True
    assert layout.options == {"bucket_mb": 12.5, "find_unused": True}


def test_defaults() -> None:
    """Without options, a layout uses one micro-batch in float32, without activation checkpointing or compile."""
    assert parse_layout("ddp") == Layout("ddp")
    layout = Layout("ddp")
    assert (layout.accumulate, layout.precision, layout.recompute, layout.compile) == (1, "float32", False, False)


@pytest.mark.parametrize(
    ("text", "fragments"),
    [
        ("dpd", ["'dpd'", "did you mean ddp", "single", "fsdp"]),
        ("nosuch", ["'nosuch'", "give one of", "single", "ddp", "zero1", "fsdp"]),
        ("", ["''", "give one of"]),
        (":shard=2", ["give one of"]),
        ("DDP", ["'DDP'", "ddp"]),
        ("ddp:", ["ddp:", "key=value"]),
        ("ddp:accumulate=4,", ["key=value"]),
        ("ddp:accumulate=", ["accumulate=", "key=value"]),
        ("ddp:=4", ["=4", "key=value"]),
        ("ddp:accumlate=4", ["accumlate", "did you mean accumulate"]),
        ("ddp:nonsense=4", ["nonsense", "accumulate", "precision"]),
        ("ddp:accumulate=2,accumulate=4", ["accumulate", "twice"]),
        ("ddp:accumulate=four", ["accumulate=four", "whole number"]),
        ("ddp:accumulate=2.5", ["accumulate=2.5", "whole number"]),
        ("ddp:accumulate", ["accumulate", "whole number"]),
        ("ddp:accumulate=0", ["accumulate=0", "at least 1"]),
        ("ddp:accumulate=-1", ["accumulate=-1", "at least 1"]),
        ("ddp:precision=O0", ["Apex's O0 computed all in float32", "precision=float32"]),
        ("ddp:precision=O1", ["weights in float32", "loss scale", "precision=fp16, or bf16"]),
        ("fsdp:precision=o2", ["precision=o2", "master weights", "precision=fp16 or bf16"]),
        ("zero1:precision=O3", ["rounds small updates away", "precision=fp16 or bf16"]),
        ("ddp:precision=fp8", ["precision=fp8", "float64, float32, bf16, fp16"]),
        ("ddp:precision", ["precision", "float64, float32, bf16, fp16"]),
        ("ddp:recompute=maybe", ["recompute=maybe", "true or false"]),
        ("ddp:find_unused=2", ["find_unused=2", "true or false"]),
        ("ddp:bucket_mb=big", ["bucket_mb=big", "a number"]),
        ("ddp:bucket_mb", ["bucket_mb", "a number"]),
        ("ddp:bucket_mb=0", ["bucket_mb=0", "above 0"]),
        ("ddp:bucket_mb=-1", ["bucket_mb=-1", "above 0"]),
        ("ddp:bucket_mb=nan", ["bucket_mb=nan"]),
        ("ddp:bucket_mb=inf", ["bucket_mb=inf"]),
        ("ddp:static_graph,accumulate=2", ["static_graph", "accumulate"]),
        ("ddp:shard=2", ["shard", "replicate"]),
        ("zero1:shard=2", ["shard", "replicate"]),
        ("single:replicate=1", ["replicate", "single"]),
        ("dataparallel:replicate=2", ["replicate", "dataparallel"]),
        ("fsdp:shard=0", ["shard=0", "at least 1"]),
        ("fsdp:shard=-2", ["shard=-2", "at least 1"]),
        ("fsdp:shard=two", ["shard=two", "whole number"]),
        ("fsdp:bucket_mb=25", ["bucket_mb", "reshard_after_forward"]),
        ("ddp:reshard_after_forward", ["reshard_after_forward", "bucket_mb"]),
        ("single:find_unused", ["find_unused", "single"]),
        ("dataparallel:recompute", ["recompute", "ddp"]),
        ("parameter_server:servers=0", ["servers=0", "at least 1"]),
        ("parameter_server:servers=two", ["servers=two", "whole number"]),
        ("parameter_server:updates=x", ["updates=x", "sync, async"]),
        ("parameter_server:updates=async,order=x", ["order=x", "arrival, seeded"]),
        ("parameter_server:order=seeded", ["order is for updates=async"]),
        ("parameter_server:precision=fp16", ["loss scale", "precision=bf16"]),
        ("parameter_server:shard=2", ["shard", "replicate", "servers"]),
        ("ddp:servers=2", ["servers", "bucket_mb"]),
        ("dataparallel:compile", ["dataparallel:compile", "leave out compile", "ddp:compile"]),
    ],
)
def test_invalid_layout_string_is_refused_in_one_line(text: str, fragments: list[str]) -> None:
    """The line has the value, the rule and the fix. The error is a ValueError with exit status 2."""
    with pytest.raises(LayoutError) as caught:
        parse_layout(text)
    message = str(caught.value)
    assert "\n" not in message
    for fragment in fragments:
        assert fragment in message
    assert isinstance(caught.value, ValueError)
    assert caught.value.exit_status == 2


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        ({"strategy": "dpd"}, "did you mean ddp"),
        ({"strategy": "ddp", "accumulate": 0}, "accumulate=0"),
        ({"strategy": "ddp", "precision": "half"}, "precision=half"),
        ({"strategy": "ddp", "degrees": {"shard": 2}}, "shard"),
        ({"strategy": "fsdp", "degrees": {"shard": 0}}, "shard=0"),
        ({"strategy": "fsdp", "options": {"bucket_mb": 1.0}}, "bucket_mb"),
        ({"strategy": "ddp", "options": {"bucket_mb": -1.0}}, "bucket_mb=-1"),
        ({"strategy": "ddp", "options": {"bucket_mb": "big"}}, "bucket_mb=big"),
        ({"strategy": "ddp", "options": {"static_graph": True}, "accumulate": 2}, "static_graph"),
    ],
)
def test_invalid_arguments_of_layout_are_refused(arguments: dict[str, object], fragment: str) -> None:
    """The class `Layout` does the checks, not its parser."""
    with pytest.raises(LayoutError, match=fragment):
        Layout(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "world_size", "mesh"),
    [
        ("single", 1, {}),
        ("single", 4, {}),
        ("dataparallel", 2, {}),
        ("ddp", 1, {"replicate": 1}),
        ("ddp", 3, {"replicate": 3}),
        ("ddp:replicate=2", 2, {"replicate": 2}),
        ("zero1", 4, {"replicate": 4}),
        ("fsdp", 2, {"shard": 2}),
        ("fsdp:shard=4", 4, {"shard": 4}),
        ("parameter_server", 2, {"replicate": 1}),
        ("parameter_server:servers=2", 5, {"replicate": 3}),
        ("parameter_server:replicate=2,servers=3", 5, {"replicate": 2}),
    ],
)
def test_default_degree_is_the_number_of_remaining_ranks(text: str, world_size: int, mesh: dict[str, int]) -> None:
    """A degree that is not given is the number of ranks that remain. A given degree must equal it."""
    assert parse_layout(text).mesh(world_size) == mesh


@pytest.mark.parametrize(
    ("text", "world_size", "fragments"),
    [
        ("fsdp:shard=3", 2, ["fsdp:shard=3", "= 3", "2 processes", "--processes 3"]),
        ("ddp:replicate=2", 4, ["ddp:replicate=2", "= 2", "4 processes", "--processes 2"]),
        ("zero1:replicate=5", 1, ["zero1:replicate=5", "= 5", "1 process", "--processes 5"]),
        ("parameter_server", 1, ["servers=1 of 1 process", "--processes 2"]),
        ("parameter_server:servers=3", 3, ["servers=3 of 3 processes", "--processes 4"]),
        ("parameter_server:replicate=2", 4, ["= 2", "3 without the servers", "--processes 3"]),
    ],
)
def test_product_of_degrees_that_is_not_the_number_of_processes_is_refused(
    text: str, world_size: int, fragments: list[str]
) -> None:
    """The error shows the product. Ranks are never left out or added silently."""
    with pytest.raises(LayoutError) as caught:
        parse_layout(text).mesh(world_size)
    for fragment in fragments:
        assert fragment in str(caught.value)
    assert "\n" not in str(caught.value)


def test_layouts_are_hashable() -> None:
    """Equal layouts are the same key of a dict, whatever the order of their options."""
    first, second = parse_layout("ddp:accumulate=2,find_unused"), parse_layout("ddp:find_unused,accumulate=2")
    assert first == second
    assert {first: 1}[second] == 1
    assert len({parse_layout(name) for name in [*STRATEGIES, *STRATEGIES]}) == len(STRATEGIES)
    assert parse_layout("fsdp:shard=2") != parse_layout("fsdp:shard=3")
    assert parse_layout("ddp:bucket_mb=1") != parse_layout("ddp:bucket_mb=2")


def test_layout_is_immutable() -> None:
    """A layout that changes during a comparison would be reported under the wrong name."""
    with pytest.raises(AttributeError):
        Layout("ddp").accumulate = 4  # type: ignore[misc]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"accumulate": "4"}, "accumulate='4': give a whole number"),
        ({"accumulate": 2.0}, "accumulate=2.0: give a whole number"),
        ({"accumulate": True}, "accumulate=True: give a whole number"),
        ({"recompute": "no"}, "recompute='no': give True or False"),
        ({"precision": None}, "precision=None: give text"),
        ({"simulated": None}, "simulated=None: give a whole number"),
        ({"degrees": {"context": 2.0}}, "context=2.0: give a whole number"),
        ({"degrees": [("context", 2)]}, "degrees=[('context', 2)]: give a dict"),
        ({"options": None}, "options=None: give a dict"),
        ({"options": {"find_unused": "false"}}, "find_unused=false: give true or false"),
    ],
)
def test_value_of_a_wrong_type_from_python_is_refused(fields: dict[str, Any], message: str) -> None:
    """The text "false" would count as true, and others would fail in the first update."""
    with pytest.raises(LayoutError) as raised:
        Layout("ddp", **fields)
    assert message in str(raised.value)
