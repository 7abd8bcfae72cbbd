"""Count habits of our prose per 1,000 words, next to the documentation of Accelerate. `make docs` prints the table.

    python docs/habits.py [PAGE.md ...]

It is a report and never fails. Code blocks, inline code, tables and link targets are left out. Without pages, it counts
README.md, the English pages, and the texts of --help.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import sys
from pathlib import Path

from everyrank.cli import main as everyrank
from everyrank.commands import COMMANDS

ROOT = Path(__file__).parents[1]
# habit: (pattern, the rate in Accelerate's documentation per 1,000 words)
HABITS = {
    "what-clauses": (r"\bwhat (?!to\b|if\b)(?=\w)", 0.3),
    "semicolons": (r";", 1.4),
    "says, said": (r"\b(?:says|said)\b", 0.1),
    "nobody, nothing, none": (r"\b(?:nobody|nothing|none|neither)\b", 0.4),
    "you, your": (r"\b(?:you|your|yours)\b", 22.4),
    "for example, such as": (r"\b(?:for example|such as)\b", 2.5),
}


def prose(text: str) -> str:
    """The sentences of a Markdown page."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^\|.*$|<!--.*?-->", "", text, flags=re.MULTILINE)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    return re.sub(r"`[^`\n]*`", "X", text)


def rates(texts: list[str]) -> tuple[int, dict[str, float]]:
    """The number of words, and each habit per 1,000 of them."""
    text = "\n".join(map(prose, texts))
    words = len(re.findall(r"[A-Za-z][\w'-]*", text))
    counts = {name: len(re.findall(pattern, text, re.IGNORECASE)) for name, (pattern, _) in HABITS.items()}
    return words, {name: 1000 * count / max(words, 1) for name, count in counts.items()}


def help_texts() -> list[str]:
    """The help of each command, with all launching options where it has some."""
    return [_help(command, "--help-all") or _help(command, "--help") for command in COMMANDS]


def _help(command: str, flag: str) -> str:
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(io.StringIO()), contextlib.suppress(SystemExit):
        everyrank([command, flag])
    return re.sub(r"\{.*?\}", "X", output.getvalue())  # choices, such as {none,linear,sqrt}


def main(arguments: list[str] | None = None) -> int:
    """Print the table; 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pages", nargs="*", type=Path)
    given: list[Path] = parser.parse_args(arguments).pages
    docs = [path for path in sorted((ROOT / "docs").rglob("*.md")) if not {"zh", "decisions"} & set(path.parts)]
    pages = given or [ROOT / "README.md", *docs]
    texts = [page.read_text(encoding="utf-8") for page in pages] + ([] if given else help_texts())
    words, rate = rates(texts)
    print(f"habits per 1,000 words, {len(pages)} pages{'' if given else ' and --help'}, {words:,} words")
    for name, (_, theirs) in HABITS.items():
        print(f"  {name:22} {rate[name]:5.1f}   Accelerate {theirs:g}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
