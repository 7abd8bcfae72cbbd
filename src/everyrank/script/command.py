"""The script or module that a user wants to run, checked before any process starts."""

from __future__ import annotations

import ast
import importlib.util
import runpy
import sys
import types
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from everyrank.errors import UsageError, describe

__all__ = ["UserScript", "read_command"]


@dataclass(frozen=True)
class UserScript:
    """A script or a module (`-m`), and its arguments, as in the command after `python`.

    name        path of the script, or name of the module
    arguments   arguments of the script or module
    is_module   whether `name` is a module
    """

    name: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False

    @property
    def stem(self) -> str:
        """A short name for files and jobs: train for src/train.py, pkg.train for -m pkg.train."""
        return self.name if self.is_module else Path(self.name).stem

    @property
    def python_args(self) -> list[str]:
        """The arguments after `python`."""
        return [*(["-m"] if self.is_module else []), self.name, *self.arguments]

    def run(self) -> None:
        """Run the script in this process as `__main__`, with its `sys.argv` and `sys.path`. Its exceptions propagate.

        The module stays in `sys.modules` afterwards, because threads and exit functions of the script may need it.
        """
        if self.is_module:
            sys.argv = [self.name, *self.arguments]
            sys.path.insert(0, str(Path.cwd()))
            runpy.run_module(self.name, run_name="__main__", alter_sys=True)
            return
        path = Path(self.name).absolute()
        sys.argv = [self.name, *self.arguments]
        sys.path.insert(0, str(path.resolve().parent))  # as python does for a script that is a symlink
        main = types.ModuleType("__main__")
        main.__file__ = str(path)
        main.__dict__["__builtins__"] = __builtins__
        sys.modules["__main__"] = main
        # without dont_inherit, the script would get the `from __future__ import annotations` of this file
        code = compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
        exec(code, main.__dict__)  # noqa: S102  (the user's script)


def read_command(python_args: Sequence[str]) -> UserScript:
    """Read a command from the arguments of `python`.

    >>> read_command(["-m", "json.tool", "--help"])
    UserScript(name='json.tool', arguments=('--help',), is_module=True)

    Raises `UsageError` for a file that does not exist, is not Python, or has a syntax error, and for an unknown module.
    """
    if not python_args or python_args == ["-m"]:
        raise UsageError("no script was given; type everyrank launch train.py, with the script's arguments after it")
    if python_args[0] == "-m":
        _check_module(python_args[1])
        return UserScript(python_args[1], tuple(python_args[2:]), is_module=True)
    path = Path(python_args[0])
    if not path.is_file():
        similar_path = path.parent / f"{path.name}.py"
        hint = f"did you mean {similar_path}?" if similar_path.is_file() else "give a Python script, or -m and a module"
        raise UsageError(f"{path}: {'it is a folder' if path.is_dir() else 'there is no such file'}; {hint}")
    try:
        _parse(path)
    except SyntaxError as error:
        text = describe(error)
        raise UsageError(text if error.lineno else f"{path}: {error.msg}") from None
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; give a Python script, or -m and a module") from None
    except (ValueError, RecursionError, MemoryError) as error:  # a null byte, or too many parentheses
        raise UsageError(f"{path}: it is not a Python script ({type(error).__name__}: {error})") from None
    return UserScript(python_args[0], tuple(python_args[1:]))


def _parse(path: Path) -> ast.Module:
    """Return the syntax tree of a script, without its warnings, which Python prints when a rank compiles it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(path.read_bytes(), str(path))


def _check_module(name: str) -> None:
    path_before = list(sys.path)
    sys.path.insert(0, str(Path.cwd()))
    try:
        spec = importlib.util.find_spec(name.partition(".")[0])
    except (ImportError, ValueError):
        spec = None
    finally:
        sys.path[:] = path_before
    if spec is None:
        raise UsageError(f"-m {name}: no module of this name was found; give its full name, or the path of a script")


def imports_horovod(command: UserScript) -> bool:
    """Whether the script itself imports Horovod, which finds its ranks only under horovodrun and MPI."""
    if command.is_module:
        return False
    names: list[str] = []
    for node in ast.walk(_parse(Path(command.name))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append(node.module or "")
    return any(name.split(".")[0] == "horovod" for name in names)


def can_preload_torch(command: UserScript) -> bool:
    """Whether torch may be imported before the script runs: the script sets no environment variable before its import.

    Torch reads variables such as OMP_NUM_THREADS and TORCH_LOGS once, when it is imported.
    """
    if command.is_module:
        return False
    tree = _parse(Path(command.name))
    for statement in tree.body:
        names = {node.attr for node in ast.walk(statement) if isinstance(node, ast.Attribute)}
        names |= {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
        if isinstance(statement, ast.Import | ast.ImportFrom):
            if any(alias.name.split(".")[0] == "torch" for alias in statement.names):
                return True
            if isinstance(statement, ast.ImportFrom) and (statement.module or "").split(".")[0] == "torch":
                return True
        elif names & {"environ", "putenv", "load_dotenv", "set_start_method"}:
            return False
    return False
