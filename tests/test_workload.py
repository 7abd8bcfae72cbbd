"""Workloads: valid and invalid fields, and how `find_workload` loads them by name or from a file."""

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
from everyrank.workload.scan import defines

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
def _undo_imports(monkeypatch: pytest.MonkeyPatch):
    """Undo the changes that loading a workload file makes to sys.path and sys.modules."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    modules_before = dict(sys.modules)
    yield
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) or ""
        if name not in modules_before and "pytest-" in file:
            del sys.modules[name]


def write(path: Path, text: str) -> Path:
    """Write a file with its parent directories, and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def write_finished(path: Path, before: str = "") -> Path:
    """Write a file with a finished workload, after these lines of code."""
    return write(path, FINISHED.format(before=before))


def line_of(path: Path, text: str) -> int:
    return next(number for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1) if text in line)


def nothing(*_: object) -> None:
    return None


def make(**values: object) -> Workload:
    """Return a workload with the required fields, and these fields added or replaced."""
    required = {"name": "mine", "model": nothing, "train_data": nothing, "loss": nothing, "optimizer": nothing}
    return Workload(**{**required, "global_batch": 8, **values})  # type: ignore[arg-type]


def test_required_fields_are_sufficient() -> None:
    """The workload that the tests below make invalid is itself valid."""
    workload = make()
    assert workload.seed == 0
    assert workload.source is None


@pytest.mark.parametrize("name", ["name", "model", "train_data", "loss", "optimizer", "global_batch"])
def test_six_fields_are_required(name: str) -> None:
    """A default for one of these fields would be a guess about what to train."""
    values = dict.fromkeys(["name", "model", "train_data", "loss", "optimizer", "global_batch"], nothing)
    del values[name]
    with pytest.raises(TypeError, match=name):
        Workload(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "fragments"),
    [
        ({"name": ""}, ["name=''"]),
        ({"name": "two\nlines"}, ["name="]),
        ({"name": "a\u200bb"}, ["name='a\\u200bb'", "printable"]),
        ({"name": "a\x7f"}, ["name='a\\x7f'", "printable"]),
        ({"model": 3}, ["model=3", "function"]),
        ({"model": None}, ["model=None", "function"]),
        ({"train_data": [1, 2]}, ["train_data", "function"]),
        ({"loss": "mse"}, ["loss='mse'", "function"]),
        ({"optimizer": "adam"}, ["optimizer='adam'", "function"]),
        ({"eval_data": [1]}, ["eval_data", "function"]),
        ({"collate": 3}, ["collate=3", "function"]),
        ({"schedule": 3}, ["schedule=3", "function"]),
        ({"metrics": {"top1": 3}}, ["top1", "function"]),
        ({"metrics": {1: nothing}}, ["metrics", "name 1 must be printable text"]),
        ({"metrics": {"": nothing}}, ["metrics", "name '' must be printable text"]),
        ({"derived": {("a", "b"): nothing}}, ["derived", "name ('a', 'b') must be printable text"]),
        ({"derived": {"two\nlines": nothing}}, ["derived", "printable text"]),
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
def test_invalid_value_is_refused(values: dict[str, object], fragments: list[str]) -> None:
    """The constructor raises an error with the value and the rule, instead of a later error in torch."""
    with pytest.raises(WorkloadError) as caught:
        make(**values)
    for fragment in fragments:
        assert fragment in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_status == 2
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("values", [{"seed": "0"}, {"seed": 1.5}, {"metrics": [nothing]}, {"clip_norm": "1"}])
def test_value_of_the_wrong_type_is_refused(values: dict[str, object]) -> None:
    """The error names the field. It is no AttributeError or TypeError from everyrank's code."""
    with pytest.raises(WorkloadError, match=next(iter(values))):
        make(**values)


def test_built_in_workloads_accept_settings() -> None:
    """Settings are passed to the workload function and kept in `source`, so that a Record can show them."""
    workload = find_workload("digits", lr=0.25, batch=32)
    assert workload.name == "digits"
    assert workload.global_batch == 32
    assert workload.source == Source("digits", {"lr": 0.25, "batch": 32})


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_built_in_workload_is_found(name: str) -> None:
    """Every name in BUILT_IN has a function that returns a Workload."""
    if name in ("mnist", "cifar10", "cifar100", "imagenet"):  # which ship no data
        with pytest.raises(WorkloadError, match=f"{name} needs --data DIR"):
            find_workload(name)
    else:
        if name == "causal-lm":
            pytest.importorskip("transformers")  # an extra
        assert isinstance(find_workload(name), Workload)


@pytest.mark.parametrize("name_or_path", ["digit", "nosuch", "", "dir/", "file.txt", "digits:workload"])
def test_unknown_name_lists_existing_workloads(name_or_path: str) -> None:
    """The error has the value and the existing names, and says that a file is possible too."""
    with pytest.raises(UsageError) as caught:
        find_workload(name_or_path)
    assert repr(name_or_path) in str(caught.value)
    assert "digits" in str(caught.value)
    assert ".py" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_misspelt_name_gets_a_suggestion() -> None:
    """For `digit`, the error suggests `digits`."""
    with pytest.raises(UsageError, match="did you mean digits"):
        find_workload("digit")


def test_file_with_a_finished_workload(tmp_path: Path) -> None:
    """A workload file may define `workload` as a Workload."""
    path = write_finished(tmp_path / "my_workload.py")
    workload = find_workload(str(path))
    assert workload.name == "mine"
    assert workload.source == Source(str(path), {})


def test_file_with_a_workload_function(tmp_path: Path) -> None:
    """A workload file may define a function `workload`, whose arguments are the settings."""
    path = write(tmp_path / "my_factory.py", FACTORY)
    assert find_workload(str(path)).name == "mine-0.1-18"
    workload = find_workload(str(path), lr=0.05)
    assert workload.name == "mine-0.05-18"
    assert workload.source == Source(str(path), {"lr": 0.05})


def test_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative path works with and without `./`."""
    write_finished(tmp_path / "relative_one.py")
    monkeypatch.chdir(tmp_path)
    assert find_workload("relative_one.py").name == "mine"
    assert find_workload("./relative_one.py").name == "mine"


def test_name_of_a_workload_in_a_file(tmp_path: Path) -> None:
    """`file.py:name` selects a finished workload or a function by name."""
    more = (
        "\nimport dataclasses\nother = dataclasses.replace(workload, name='other')\ndef made(width=1): return other\n"
    )
    path = write(tmp_path / "several.py", FINISHED.format(before="") + more)
    assert find_workload(str(path)).name == "mine"
    assert find_workload(f"{path}:workload").name == "mine"
    assert find_workload(f"{path}:other").name == "other"
    assert find_workload(f"{path}:made", width=2).name == "other"


@pytest.mark.parametrize("folder", ["with:colon", "with space", "dot.py"])
def test_colon_or_py_in_directory_names(tmp_path: Path, folder: str) -> None:
    """A colon, a space or `.py` in a directory name does not start the name of a workload."""
    path = write_finished(tmp_path / folder / "awkward.py")
    assert find_workload(str(path)).name == "mine"


def test_workload_file_imports_from_its_own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory of the file is on sys.path. The working directory does not matter."""
    path = write_finished(tmp_path / "project" / "with_neighbour.py", "from their_neighbour import NAME")
    write(tmp_path / "project" / "their_neighbour.py", 'NAME = "from the neighbour"\n')
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert find_workload(str(path)).name == "from the neighbour"
    assert find_workload("../project/with_neighbour.py").name == "from the neighbour"


@pytest.mark.parametrize("stem", ["digits", "json", "torch", "random", "everyrank", "pytest", "my-file", "1st"])
def test_file_may_have_the_name_of_a_module(tmp_path: Path, stem: str) -> None:
    """The user's file is loaded, and the module with the same name stays in sys.modules."""
    module = sys.modules.get(stem)
    path = write_finished(tmp_path / f"{stem}.py")
    assert find_workload(str(path)).name == "mine"
    if module is not None:
        assert sys.modules[stem] is module


@pytest.mark.parametrize("stem", ["torch", "numpy", "digits"])
def test_file_named_like_a_library_can_import_it(tmp_path: Path, stem: str) -> None:
    """`import torch` in torch.py imports the library, although the directory of the file is on sys.path.

    A new interpreter is used, in which the library has not been imported before.
    """
    imports = "import torch\nfrom torch import nn\nNAME = nn.Linear.__name__\nimport numpy\nnumpy.zeros(1)"
    path = write_finished(tmp_path / f"{stem}.py", imports)
    code = f"from everyrank import find_workload; print(find_workload({str(path)!r}).name)"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert process.returncode == 0, process.stderr
    assert process.stdout == "Linear\n"


def test_two_files_with_the_same_name(tmp_path: Path) -> None:
    """A file is loaded even if a file with the same name was loaded before from another directory."""
    for folder in ("a", "b", "c"):
        path = write_finished(tmp_path / folder / "same_name.py", f"NAME = {folder!r}")
        assert find_workload(str(path)).name == folder
    assert find_workload(str(tmp_path / "a" / "same_name.py")).name == "a"


def test_missing_file(tmp_path: Path) -> None:
    """The error has the full path."""
    with pytest.raises(UsageError) as caught:
        find_workload(str(tmp_path / "nosuch.py"))
    assert str(tmp_path / "nosuch.py") in str(caught.value)


def test_file_without_a_workload(tmp_path: Path) -> None:
    """A plain script is not run. The error suggests `everyrank audit`."""
    path = write(tmp_path / "without.py", "raise RuntimeError('it was run')\n")
    with pytest.raises(WorkloadError) as caught:
        find_workload(str(path))
    assert "without.py" in str(caught.value)
    assert "everyrank audit" in str(caught.value)


def test_file_with_workloads_of_other_names(tmp_path: Path) -> None:
    """The error lists the workloads in the file as `file.py:name`."""
    path = write(tmp_path / "others.py", FINISHED.format(before="") + "small = workload\ndel workload\n")
    with pytest.raises(WorkloadError, match=r"others\.py:small"):
        find_workload(str(path))
    with pytest.raises(WorkloadError, match="nosuch"):
        find_workload(f"{path}:nosuch")


def test_misspelt_name_of_a_workload_function(tmp_path: Path) -> None:
    """A file with a function that builds a workload is not called a plain script."""
    path = write(tmp_path / "d.py", FACTORY)
    with pytest.raises(WorkloadError, match=r"defines no `wrkload`. It defines workload: write d\.py:workload"):
        find_workload(f"{path}:wrkload")
    path = write(tmp_path / "e.py", "import d\n\ndef workload():\n    return d.workload()\n")
    with pytest.raises(WorkloadError, match=r"It defines workload: write e\.py:workload"):
        find_workload(f"{path}:wrkload")
    path = write(tmp_path / "f.py", FACTORY.replace("def workload", "def small"))
    with pytest.raises(WorkloadError, match=r"defines no `workload`. It defines small: write f\.py:small"):
        find_workload(str(path))


def test_workload_assigned_by_a_function(tmp_path: Path) -> None:
    """`global workload` in a function defines the name."""
    lines = FINISHED.format(before="def setup():\n    global workload\n").split("workload = ")
    path = write(tmp_path / "in_function.py", "    workload = ".join(lines).replace("{\n", "{") + "\nsetup()\n")
    assert find_workload(str(path)).name == "mine"


def test_all_names_of_a_module_in_an_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package is not imported to find the file of its module."""
    write(tmp_path / "lib" / "some_package" / "__init__.py", "")
    write_finished(tmp_path / "lib" / "some_package" / "training.py")
    write(tmp_path / "lib" / "some_package" / "inner" / "__init__.py", "from ..training import *\n")
    monkeypatch.syspath_prepend(str(tmp_path / "lib"))
    for module in ("some_package.training", "some_package.inner"):
        path = write(tmp_path / "starred.py", f"from {module} import *\n")
        assert defines(path, "workload")
        assert not defines(path, "training")
    assert "some_package" not in sys.modules
    assert find_workload(str(path)).name == "mine"


def test_file_called_main(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the console script, the module `__main__` has no spec."""
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    path = write_finished(tmp_path / "pkg" / "__main__.py")
    assert find_workload(str(path)).name == "mine"


@pytest.mark.parametrize("value", ["3", "None", "'digits'", "lambda: 3", "dict"])
def test_value_that_is_no_workload_is_refused(tmp_path: Path, value: str) -> None:
    """`workload` must be a Workload or a function that returns one."""
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
def test_file_that_raises_on_import(tmp_path: Path, case: str) -> None:
    """The error has the file, line and function in one line. A SystemExit does not end the process."""
    code, expected = RAISES[case]
    path = write(tmp_path / "my_raising.py", f"'''Mine.'''\n{code}\nworkload = None\n")
    with pytest.raises(WorkloadError) as caught:
        find_workload(str(path))
    message = str(caught.value)
    assert f"my_raising.py:{line_of(path, '# here')}" in message
    assert expected in message
    assert "\n" not in message


def test_file_in_another_encoding_is_named(tmp_path: Path) -> None:
    """The error names the file, unlike Python's own error."""
    path = tmp_path / "latin.py"
    path.write_bytes("name = 'größer'\n".encode("latin-1"))
    with pytest.raises(WorkloadError, match=r"latin\.py"):
        find_workload(str(path))


def test_imported_file_that_raises(tmp_path: Path) -> None:
    """The error has the innermost line of the user's code, even if it is in another file."""
    path = write_finished(tmp_path / "outer.py", "import raising_neighbour")
    write(tmp_path / "raising_neighbour.py", "\n\nraise RuntimeError('inner')\n")
    with pytest.raises(WorkloadError, match=r"^raising_neighbour\.py:3 in <module>: RuntimeError: inner"):
        find_workload(str(path))


def test_file_that_raised_can_be_loaded_again(tmp_path: Path) -> None:
    """In a notebook, users fix the file and load it again. A partly imported module must not be kept."""
    path = write(tmp_path / "mended.py", "raise RuntimeError('boom')\nworkload = None\n")
    with pytest.raises(WorkloadError, match="boom"):
        find_workload(str(path))
    write_finished(path, "# another length, so that no cached bytecode is taken")
    assert find_workload(str(path)).name == "mine"


def test_workload_function_that_raises(tmp_path: Path) -> None:
    """The error has the file, line and function, as for an error on import."""
    path = write(tmp_path / "raising_factory.py", "def workload(lr=0.1):\n    raise RuntimeError(f'lr {lr}')\n")
    with pytest.raises(WorkloadError, match=r"raising_factory\.py:2 in workload: RuntimeError: lr 0.5"):
        find_workload(str(path), lr=0.5)


def test_unknown_setting_lists_existing_settings(tmp_path: Path) -> None:
    """A misspelt setting that is silently ignored would train a different model."""
    path = write(tmp_path / "settings.py", FACTORY)
    with pytest.raises(UsageError) as caught:
        find_workload(str(path), learning_rate=0.5)
    for fragment in ("learning_rate", "0.5", "lr", "depth"):
        assert fragment in str(caught.value)


def test_settings_for_a_finished_workload_are_refused(tmp_path: Path) -> None:
    """A finished workload cannot use settings. The error suggests a function `workload`."""
    path = write_finished(tmp_path / "fixed.py")
    with pytest.raises(UsageError, match="def workload"):
        find_workload(str(path), lr=0.5)


def test_setting_without_a_default_is_required(tmp_path: Path) -> None:
    """The error for `def workload(lr)` suggests `--set lr=`."""
    path = write(tmp_path / "needs.py", FACTORY.replace("lr=0.1", "lr"))
    with pytest.raises(UsageError, match=r"--set lr="):
        find_workload(str(path))
    assert find_workload(str(path), lr=1).name == "mine-1-18"


@pytest.mark.parametrize("future", ["", "from __future__ import annotations\n"])
@pytest.mark.parametrize(
    ("annotation", "right", "wrong"),
    [
        ("float", [0.5, 1, None], ["abc", True]),
        ("int", [3, None], ["abc", 1.5, True]),
        ("bool", [True, None], [1, "yes"]),
        ("str", ["abc", None], [3]),
        ("[float]", [0.5, "abc"], []),
        ("float | str", [0.5, "abc"], []),
    ],
)
def test_setting_of_the_wrong_type_is_refused(
    future: str, annotation: str, right: list[Any], wrong: list[Any], tmp_path: Path
) -> None:
    """Annotations are classes, or text under `from __future__ import annotations`. A bool is not a number."""
    path = write(tmp_path / "typed.py", future + FACTORY.replace("lr=0.1", f"lr: {annotation} = None"))
    for value in right:
        assert find_workload(str(path), lr=value).name == f"mine-{value}-18"
    for value in wrong:
        with pytest.raises(UsageError, match=f"--set lr={value}: typed.py:workload needs {annotation} there"):
            find_workload(str(path), lr=value)


def test_function_with_positional_arguments_needs_no_value_for_them(tmp_path: Path) -> None:
    path = write(tmp_path / "positional.py", FACTORY.replace("lr=0.1", "*args, lr=0.1"))
    assert find_workload(str(path), depth=2).name == "mine-0.1-2"
    with pytest.raises(
        UsageError, match=r"--set args=3: positional\.py:workload has no such setting; it takes lr, depth"
    ):
        find_workload(str(path), args=3)


@pytest.mark.parametrize("parameter", ["batch", "batch=None", "batch: int = True", "batch=0"])
def test_batch_of_a_function_without_a_default_batch(parameter: str, tmp_path: Path) -> None:
    """`--batch` gives the argument. There is no old batch to scale the learning rate from."""
    text = FACTORY.replace("lr=0.1", f"{parameter}, lr=0.1" if "=" in parameter else f"{parameter}, *, lr=0.1")
    path = write(tmp_path / "batched.py", text.replace("global_batch=8", "global_batch=batch or 8"))
    workload = load(Source(str(path), {}, 16))
    assert workload.global_batch == 16
    assert workload.batch_rule is None
    with pytest.raises(UsageError, match="--lr-rule linear: the workload function has no default batch"):
        load(Source(str(path), {}, 16, "linear"))
    assert "8 -> 16: learning rate x 2" in str(load(Source(str(path), {"batch": 8}, 16, "linear")).batch_rule)


def test_function_with_keyword_arguments_accepts_any_setting(tmp_path: Path) -> None:
    """A function with `**settings` accepts every key."""
    path = write(tmp_path / "anything.py", FACTORY.replace("lr=0.1, depth=18", "lr=1, depth=2, **settings"))
    assert find_workload(str(path), colour="red").name == "mine-1-2"
    path = write(tmp_path / "needs_lr.py", FACTORY.replace("lr=0.1, depth=18", "lr, depth: int = 2, **settings"))
    with pytest.raises(UsageError, match="needs a value for lr: --set lr="):
        find_workload(str(path), colour="red")
    with pytest.raises(UsageError, match="needs int there"):
        find_workload(str(path), lr=1, depth="abc")


def test_settings_are_parsed_as_literals_or_text() -> None:
    """`lr=0.05` is a number, and `norm=group` is text. No code is evaluated."""
    settings = ["lr=0.05", "n=3", "norm=group", "on=true", "off=False", "no=none", "l=[1, 2]", "t='3'", "e=", "u=a=b"]
    assert parse_settings(settings) == {
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
    assert parse_settings(["x={[]:2}", "y={{1}}"]) == {"x": "{[]:2}", "y": "{{1}}"}
    assert parse_settings([]) == {}


@pytest.mark.parametrize("setting", ["lr", "=3", "1st=3", "a-b=3", ""])
def test_setting_without_key_or_value_is_refused(setting: str) -> None:
    """The error has the argument and the form `key=value`."""
    with pytest.raises(UsageError, match="key=value") as caught:
        parse_settings([setting])
    assert setting in str(caught.value)


def test_source_can_be_pickled_and_loaded(tmp_path: Path) -> None:
    """Ranks receive the path and the settings of a workload, and load it from them."""
    path = write(tmp_path / "travels.py", FACTORY)
    workload = find_workload(str(path), lr=0.5)
    source = pickle.loads(pickle.dumps(workload.source))
    assert source == workload.source
    assert load(source).name == workload.name == "mine-0.5-18"


def test_load_returns_a_workload_unchanged() -> None:
    """A `Workload` that is made in a notebook needs no source."""
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
def test_metric_without_sum_and_count_is_named(returned: Any, message: str) -> None:
    """The wrong metrics return one value for each sample, or a sum without its count."""
    workload = dataclasses.replace(
        find_workload("digits"), metrics={"top1": lambda output, target: returned(output.argmax(1) == target)}
    )
    batch = Batch(torch.zeros(4, 1, 8, 8), torch.zeros(4, dtype=torch.long), 4, 0, 4, 1)
    with pytest.raises(WorkloadError, match=message):
        evaluate_batch(workload, torch.zeros(4, 10), batch)
