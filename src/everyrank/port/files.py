"""ScriptFiles: a script, and another file with its training loop, as one text to edit and two files to write."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from everyrank.errors import UsageError

__all__ = ["ScriptFiles"]

_BORDER = "# everyrank: the other file begins here"


@dataclasses.dataclass(frozen=True)
class ScriptFiles:
    """The texts of a script and of another file, in the same folder or below it; "" if there is none.

    target     the end of the ports' names: train_ddp.py
    port_name  the name of the script's port; "" for train_ddp.py of train.py

    In facts and edits, the lines of the other file are numbered after the lines of the script.
    """

    script: Path
    text: str
    other: Path | None = None
    other_text: str = ""
    port_name: str = ""
    target: str = "ddp"

    def __post_init__(self) -> None:
        if self.other is None:
            return
        folder = self.script.absolute().parent
        if not self.other.absolute().is_relative_to(folder):
            raise UsageError(f"--with {self.other}: it is not below the folder of {self.script}, so it is not ported")
        if ("\r\n" in self.text) != ("\r\n" in self.other_text):
            raise UsageError(
                f"--with {self.other}: its line ends differ from those of {self.script}; convert one of the two files"
            )

    @property
    def newline(self) -> str:
        """The line end of both files."""
        return "\r\n" if "\r\n" in self.text else "\n"

    @property
    def whole(self) -> str:
        """The text to edit: the script, a border, the other file."""
        if self.other is None:
            return self.text
        end = "" if self.text.endswith("\n") else self.newline
        return f"{self.text}{end}{_BORDER}{self.newline}{self.other_text}"

    @property
    def num_lines(self) -> int:
        """The number of lines before the other file; 0 if there is none."""
        return self.whole[: self.whole.index(_BORDER)].count("\n") + 1 if self.other is not None else 0

    @property
    def module(self) -> str:
        """The module name of the other file in the script: "engine" or "pkg.engine"."""
        if self.other is None:
            return ""
        return ".".join(self.other.absolute().relative_to(self.script.absolute().parent).with_suffix("").parts)

    def parts(self, whole: str) -> tuple[str, str]:
        """Return the edited script and the edited other file."""
        first, _, second = whole.partition(_BORDER)
        return first, re.sub(r"^\r?\n", "", second)

    def place(self, line: int) -> str:
        """Name a line of the text to edit: "line 12", or "engine.py line 12"."""
        if self.other is None or line <= self.num_lines:
            return f"line {line}"
        return f"{self.other.name} line {line - self.num_lines}"

    def written(self, text: str, other_text: str) -> dict[str, str]:
        """Return the files of a port by their names, relative to the folder of the script; the script first."""
        files = {self.port_name or f"{self.script.stem}_{self.target}.py": text}
        if self.other is not None:
            name = self.other.absolute().relative_to(self.script.absolute().parent)
            files[str(name.with_name(f"{name.stem}_{self.target}.py"))] = other_text
        return files
