"""Workloads: what a person may write, and how it is found by name or by file."""

import dataclasses
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from everyrank import Workload, find_workload
from everyrank.data import Batch
from everyrank.errors import UsageError, WorkloadError
from everyrank.parallel.loss import evaluate_batch
from everyrank.workload import BUILT_IN, Source, load, parse_settings

FINISHED = """
from everyrank import Workload

def nothing(*_):
    return None

NAME = "mine"
{before}
workload = Workload(name=NAME, model=nothing, train_data=nothing, loss=nothing, optimizer=nothing, global_batch=8)
"""

FACTORY = """
from everyrank import Workload

def workload(lr=0.1, depth=18):
    def nothing(*_):
        return lr, depth
    return Workload(
        name=f"mine-{lr}-{depth}", model=nothing, train_data=nothing, loss=nothing, optimizer=nothing, global_batch=8
    )
"""


@pytest.fixture(autouse=True)
def _imports_are_undone(monkeypatch: pytest.MonkeyPatch):
    """A workload file puts its folder on sys.path and itself into sys.modules; the next test starts clean."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = dict(sys.modules)
    yield
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) or ""
        if name not in before and "pytest-" in file:
            del sys.modules[name]


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def finished(path: Path, before: str = "") -> Path:
    return write(path, FINISHED.format(before=before))


def line_of(path: Path, word: str) -> int:
    return next(n for n, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1) if word in line)


def nothing(*_: object) -> None:
    return None


def make(**values: object) -> Workload:
    needed = {"name": "mine", "model": nothing, "train_data": nothing, "loss": nothing, "optimizer": nothing}
    return Workload(**{**needed, "global_batch": 8, **values})  # type: ignore[arg-type]


def test_what_is_required_is_enough() -> None:
    """The least a person has to write; also the base of the refusals below."""
    workload = make()
    assert workload.seed == 0
    assert workload.source is None


@pytest.mark.parametrize("name", ["name", "model", "train_data", "loss", "optimizer", "global_batch"])
def test_six_things_are_required(name: str) -> None:
    """A default for one of these would be a guess about the mathematics."""
    values = dict.fromkeys(["name", "model", "train_data", "loss", "optimizer", "global_batch"], nothing)
    del values[name]
    with pytest.raises(TypeError, match=name):
        Workload(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "fragments"),
    [
        ({"name": ""}, ["name=''"]),
        ({"name": "two\nlines"}, ["name="]),
        ({"model": 3}, ["model=3", "function"]),
        ({"model": None}, ["model=None", "function"]),
        ({"train_data": [1, 2]}, ["train_data", "function"]),
        ({"loss": "mse"}, ["loss='mse'", "function"]),
        ({"optimizer": "adam"}, ["optimizer='adam'", "function"]),
        ({"eval_data": [1]}, ["eval_data", "function"]),
        ({"collate": 3}, ["collate=3", "function"]),
        ({"schedule": 3}, ["schedule=3", "function"]),
        ({"metrics": {"top1": 3}}, ["top1", "function"]),
        ({"global_batch": 0}, ["global_batch=0", "at least 1"]),
        ({"global_batch": -4}, ["global_batch=-4", "at least 1"]),
        ({"global_batch": 2.5}, ["global_batch=2.5", "whole number"]),
        ({"global_batch": "64"}, ["global_batch='64'", "whole number"]),
        ({"global_batch": None}, ["global_batch=None", "whole number"]),
        ({"global_batch": True}, ["global_batch=True", "whole number"]),
        ({"epochs": 0}, ["epochs=0", "at least 1"]),
        ({"steps": 0}, ["steps=0", "at least 1"]),
        ({"steps": 1.5}, ["steps=1.5", "whole number"]),
        ({"epochs": 2, "steps": 10}, ["epochs=2", "steps=10", "one of the two"]),
        ({"clip_norm": 0}, ["clip_norm=0", "above 0"]),
        ({"clip_norm": -1.0}, ["clip_norm=-1.0", "above 0"]),
        ({"clip_norm": float("nan")}, ["clip_norm=nan"]),
    ],
)
def test_a_value_that_cannot_be_meant_is_refused(values: dict[str, object], fragments: list[str]) -> None:
    """Found where it is written, with the value and the rule, not as a torch error many frames later."""
    with pytest.raises(WorkloadError) as caught:
        make(**values)
    for fragment in fragments:
        assert fragment in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_status == 2
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("values", [{"seed": "0"}, {"seed": 1.5}, {"metrics": [nothing]}, {"clip_norm": "1"}])
def test_a_value_of_the_wrong_type_is_refused(values: dict[str, object]) -> None:
    """Refused by name too, not with an AttributeError or TypeError of ours."""
    with pytest.raises(WorkloadError, match=next(iter(values))):
        make(**values)


def test_built_in_workloads_take_settings() -> None:
    """`--set lr=0.1` arrives in the function, and the Record can say so."""
    workload = find_workload("digits", lr=0.25, batch=32)
    assert workload.name == "digits"
    assert workload.global_batch == 32
    assert workload.source == Source("digits", {"lr": 0.25, "batch": 32})


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_built_in_workload_is_found(name: str) -> None:
    """A line of the table that names a function which is not there."""
    if name in ("mnist", "cifar10", "cifar100", "imagenet"):  # which ship no data
        with pytest.raises(WorkloadError, match=f"{name} needs --data DIR"):
            find_workload(name)
    else:
        if name == "causal-lm":
            pytest.importorskip("transformers")  # an extra
        assert isinstance(find_workload(name), Workload)


@pytest.mark.parametrize("place", ["digit", "nosuch", "", "dir/", "file.txt", "digits:workload"])
def test_an_unknown_name_says_what_there_is(place: str) -> None:
    """The value, what there is, and that a file is possible too."""
    with pytest.raises(UsageError) as caught:
        find_workload(place)
    assert repr(place) in str(caught.value)
    assert "digits" in str(caught.value)
    assert ".py" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_near_miss_is_guessed() -> None:
    """`digit` for `digits`."""
    with pytest.raises(UsageError, match="did you mean digits"):
        find_workload("digit")


def test_a_file_with_a_finished_workload(tmp_path: Path) -> None:
    """The first form of a workload file."""
    path = finished(tmp_path / "my_workload.py")
    workload = find_workload(str(path))
    assert workload.name == "mine"
    assert workload.source == Source(str(path), {})


def test_a_file_with_a_function(tmp_path: Path) -> None:
    """The second form: `def workload(lr=0.1)` takes settings."""
    path = write(tmp_path / "my_factory.py", FACTORY)
    assert find_workload(str(path)).name == "mine-0.1-18"
    workload = find_workload(str(path), lr=0.05)
    assert workload.name == "mine-0.05-18"
    assert workload.source == Source(str(path), {"lr": 0.05})


def test_a_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is typed most often."""
    finished(tmp_path / "relative_one.py")
    monkeypatch.chdir(tmp_path)
    assert find_workload("relative_one.py").name == "mine"
    assert find_workload("./relative_one.py").name == "mine"


def test_another_name_in_the_file(tmp_path: Path) -> None:
    """`file.py:name`, for a finished workload and for a function."""
    more = (
        "\nimport dataclasses\nother = dataclasses.replace(workload, name='other')\ndef made(width=1): return other\n"
    )
    path = write(tmp_path / "several.py", FINISHED.format(before="") + more)
    assert find_workload(str(path)).name == "mine"
    assert find_workload(f"{path}:workload").name == "mine"
    assert find_workload(f"{path}:other").name == "other"
    assert find_workload(f"{path}:made", width=2).name == "other"


@pytest.mark.parametrize("folder", ["with:colon", "with space", "dot.py"])
def test_awkward_folders(tmp_path: Path, folder: str) -> None:
    """A colon or a `.py` in the path is not the name of a workload."""
    path = finished(tmp_path / folder / "awkward.py")
    assert find_workload(str(path)).name == "mine"


def test_neighbours_are_imported_from_another_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder of the file is on sys.path, not the one that the person stands in."""
    path = finished(tmp_path / "project" / "with_neighbour.py", "from their_neighbour import NAME")
    write(tmp_path / "project" / "their_neighbour.py", 'NAME = "from the neighbour"\n')
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert find_workload(str(path)).name == "from the neighbour"
    assert find_workload("../project/with_neighbour.py").name == "from the neighbour"


@pytest.mark.parametrize("stem", ["digits", "json", "torch", "random", "everyrank", "pytest", "my-file", "1st"])
def test_a_file_may_be_called_anything(tmp_path: Path, stem: str) -> None:
    """A file called like a module is imported as the person's file, and the module stays what it was."""
    before = sys.modules.get(stem)
    path = finished(tmp_path / f"{stem}.py")
    assert find_workload(str(path)).name == "mine"
    if before is not None:
        assert sys.modules[stem] is before


@pytest.mark.parametrize("stem", ["torch", "numpy", "digits"])
def test_a_file_called_like_a_library_can_still_use_it(tmp_path: Path, stem: str) -> None:
    """Its own folder comes first on sys.path: `import torch` in torch.py must not import the file itself.

    In a fresh interpreter, where nobody has imported the library before.
    """
    uses = "import torch\nfrom torch import nn\nNAME = nn.Linear.__name__\nimport numpy\nnumpy.zeros(1)"
    path = finished(tmp_path / f"{stem}.py", uses)
    code = f"from everyrank import find_workload; print(find_workload({str(path)!r}).name)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "Linear\n"


def test_two_files_of_the_same_name(tmp_path: Path) -> None:
    """The second `my.py` of a session is not the first one."""
    for folder in ("a", "b", "c"):
        path = finished(tmp_path / folder / "same_name.py", f"NAME = {folder!r}")
        assert find_workload(str(path)).name == folder
    assert find_workload(str(tmp_path / "a" / "same_name.py")).name == "a"


def test_no_file(tmp_path: Path) -> None:
    """The place that was looked at is named in full."""
    with pytest.raises(UsageError) as caught:
        find_workload(str(tmp_path / "nosuch.py"))
    assert str(tmp_path / "nosuch.py") in str(caught.value)


def test_a_file_without_workload(tmp_path: Path) -> None:
    """It is a plain script, which is not run: the message names what can be done with it."""
    path = write(tmp_path / "without.py", "raise RuntimeError('it was run')\n")
    with pytest.raises(WorkloadError) as caught:
        find_workload(str(path))
    assert "without.py" in str(caught.value)
    assert "everyrank audit" in str(caught.value)


def test_a_file_with_workloads_of_other_names(tmp_path: Path) -> None:
    """It says which ones there are and how to name them."""
    path = write(tmp_path / "others.py", FINISHED.format(before="") + "small = workload\ndel workload\n")
    with pytest.raises(WorkloadError, match=r"others\.py:small"):
        find_workload(str(path))
    with pytest.raises(WorkloadError, match="nosuch"):
        find_workload(f"{path}:nosuch")


@pytest.mark.parametrize("value", ["3", "None", "'digits'", "lambda: 3", "dict"])
def test_what_is_no_workload_is_refused(tmp_path: Path, value: str) -> None:
    """`workload` has to be one, or return one."""
    path = write(tmp_path / "wrong_kind.py", f"workload = {value}\n")
    with pytest.raises(WorkloadError, match="Workload"):
        find_workload(str(path))


RAISES = {
    "at once": ("raise RuntimeError('boom')  # here", "in <module>: RuntimeError: boom"),
    "in a function": ("def f():\n    return {}['x']  # here\nf()", "in f: KeyError: 'x'"),
    "without text": ("raise ValueError  # here", "in <module>: ValueError"),
    "many lines": ("raise RuntimeError('boom\\nmore')  # here", "in <module>: RuntimeError: boom"),
    "no such module": ("import nosuch_module  # here", "No module named 'nosuch_module'"),
    "assertion": ("assert 1 == 2, 'no'  # here", "AssertionError: no"),
    "a library's own frames": ("import json\njson.loads('{')  # here", "in <module>: JSONDecodeError"),
    "syntax": ("def f(:  # here", "SyntaxError"),
    "exit": ("raise SystemExit(3)  # here", "SystemExit"),
    "arguments": (
        "import argparse\nargparse.ArgumentParser().parse_args(['--nosuch'])  # here",
        "SystemExit",
    ),
}


@pytest.mark.parametrize("case", RAISES)
def test_a_file_that_raises_on_import(tmp_path: Path, case: str) -> None:
    """File, line and function of the person's own code, in one line; a SystemExit is no way to end our process."""
    code, expected = RAISES[case]
    path = write(tmp_path / "my_raising.py", f"'''Mine.'''\n{code}\nworkload = None\n")
    with pytest.raises(WorkloadError) as caught:
        find_workload(str(path))
    message = str(caught.value)
    assert f"my_raising.py:{line_of(path, '# here')}" in message
    assert expected in message
    assert "\n" not in message


def test_a_file_in_another_encoding_is_named(tmp_path: Path) -> None:
    """Python's own error has no file in it that a person could open."""
    path = tmp_path / "latin.py"
    path.write_bytes("name = 'größer'\n".encode("latin-1"))
    with pytest.raises(WorkloadError, match=r"latin\.py"):
        find_workload(str(path))


def test_a_neighbour_that_raises(tmp_path: Path) -> None:
    """The innermost frame of the person's own code is the one to read, in whichever of their files it is."""
    path = finished(tmp_path / "outer.py", "import raising_neighbour")
    write(tmp_path / "raising_neighbour.py", "\n\nraise RuntimeError('inner')\n")
    with pytest.raises(WorkloadError, match=r"^raising_neighbour\.py:3 in <module>: RuntimeError: inner"):
        find_workload(str(path))


def test_a_file_that_raised_is_read_again(tmp_path: Path) -> None:
    """In a notebook one mends the file and calls again: a half-imported module must not be kept."""
    path = write(tmp_path / "mended.py", "raise RuntimeError('boom')\nworkload = None\n")
    with pytest.raises(WorkloadError, match="boom"):
        find_workload(str(path))
    finished(path, "# another length, so that no cached bytecode is taken")
    assert find_workload(str(path)).name == "mine"


def test_a_function_that_raises(tmp_path: Path) -> None:
    """The same line for `def workload()` itself."""
    path = write(tmp_path / "raising_factory.py", "def workload(lr=0.1):\n    raise RuntimeError(f'lr {lr}')\n")
    with pytest.raises(WorkloadError, match=r"raising_factory\.py:2 in workload: RuntimeError: lr 0.5"):
        find_workload(str(path), lr=0.5)


def test_an_unknown_setting_says_which_there_are(tmp_path: Path) -> None:
    """A misspelt setting that is silently ignored trains something else."""
    path = write(tmp_path / "settings.py", FACTORY)
    with pytest.raises(UsageError) as caught:
        find_workload(str(path), learning_rate=0.5)
    for fragment in ("learning_rate", "0.5", "lr", "depth"):
        assert fragment in str(caught.value)


def test_settings_for_a_finished_workload_are_refused(tmp_path: Path) -> None:
    """They would go nowhere; the fix is a function."""
    path = finished(tmp_path / "fixed.py")
    with pytest.raises(UsageError, match="def workload"):
        find_workload(str(path), lr=0.5)


def test_a_setting_that_must_be_given(tmp_path: Path) -> None:
    """`def workload(lr)` without a default."""
    path = write(tmp_path / "needs.py", FACTORY.replace("lr=0.1", "lr"))
    with pytest.raises(UsageError, match=r"--set lr="):
        find_workload(str(path))
    assert find_workload(str(path), lr=1).name == "mine-1-18"


def test_a_function_that_takes_anything(tmp_path: Path) -> None:
    """`**settings` takes every key."""
    path = write(tmp_path / "anything.py", FACTORY.replace("lr=0.1, depth=18", "lr=1, depth=2, **settings"))
    assert find_workload(str(path), colour="red").name == "mine-1-2"


def test_settings_are_read_as_python_or_as_text() -> None:
    """`lr=0.05` is a number, `norm=group` is text; nothing is evaluated."""
    words = ["lr=0.05", "n=3", "norm=group", "on=true", "off=False", "no=none", "l=[1, 2]", "t='3'", "e=", "u=a=b"]
    assert parse_settings(words) == {
        "lr": 0.05,
        "n": 3,
        "norm": "group",
        "on": True,
        "off": False,
        "no": None,
        "l": [1, 2],
        "t": "3",
        "e": "",
        "u": "a=b",
    }
    assert parse_settings(["x=__import__('os').getpid()"]) == {"x": "__import__('os').getpid()"}
    assert parse_settings([]) == {}


@pytest.mark.parametrize("word", ["lr", "=3", "1st=3", "a-b=3", ""])
def test_a_setting_that_is_no_pair(word: str) -> None:
    """The word and the form it should have."""
    with pytest.raises(UsageError, match="key=value") as caught:
        parse_settings([word])
    assert word in str(caught.value)


def test_a_source_travels(tmp_path: Path) -> None:
    """What is sent to the ranks is the place and the settings, and every rank finds the same workload there."""
    path = write(tmp_path / "travels.py", FACTORY)
    workload = find_workload(str(path), lr=0.5)
    source = pickle.loads(pickle.dumps(workload.source))
    assert source == workload.source
    assert load(source).name == workload.name == "mine-0.5-18"


def test_loading_a_workload_gives_it_back() -> None:
    """A `Workload` made in a notebook needs no place."""
    workload = make()
    assert load(workload) is workload


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (
            lambda right: (right, len(right)),
            r"top1: it returned a tensor of shape \(4,\) as the sum; add up its numbers",
        ),
        (lambda right: right.sum(), r"top1: it returned a tensor of shape \(\); it must return \(sum over the terms"),
    ],
)
def test_a_metric_that_returns_no_sum_and_count_is_named(returned: Any, message: str) -> None:
    """The number of right classes of each sample, and a sum without its count."""
    workload = dataclasses.replace(
        find_workload("digits"), metrics={"top1": lambda output, target: returned(output.argmax(1) == target)}
    )
    batch = Batch(torch.zeros(4, 1, 8, 8), torch.zeros(4, dtype=torch.long), 4, 0, 4, 1)
    with pytest.raises(WorkloadError, match=message):
        evaluate_batch(workload, torch.zeros(4, 10), batch)
