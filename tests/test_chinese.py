"""Pages in Chinese have what the English ones have: the same headings, code, tables, numbers and links."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
CHINESE = re.compile("[\u3000-\u303f\u4e00-\u9fff\uff00-\uffef]")
CODE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
NUMBER = re.compile(r"\d+(?:[.,]\d+)*")


@pytest.fixture
def root(repository: Path) -> Path:
    if not (repository / "CONTRIBUTING.md").exists():
        pytest.skip("a source distribution has no such pages")
    return repository


def pairs(root: Path) -> Iterator[tuple[Path, Path]]:
    """Every page that is there in Chinese, after the English one."""
    yield root / "README.md", root / "README.zh.md"
    for page in sorted((root / "docs" / "zh").rglob("*.md")):
        yield root / "docs" / page.relative_to(root / "docs" / "zh"), page


def is_same_line(english: str, chinese: str) -> bool:
    """Of a block: the same up to an explanation, which stands two blanks apart or is a comment or docstring."""
    english, chinese = (re.sub(r"<[^\x00-\x7f]+>|<this repository>", "<>", line) for line in (english, chinese))
    first = CHINESE.search(chinese)
    if first is None:
        return english == chinese
    begins = max(chinese.rfind(mark, 0, first.start()) for mark in ("  ", "# ", '"""'))
    code = chinese[: max(begins, 0)].rstrip()
    explanation = english.removeprefix(code)
    return english.startswith(code) and re.match(r'  |\s*# |\s*"""', explanation) is not None


def tables(text: str) -> list[list[list[str]]]:
    """Tables, rows, cells."""
    found = re.findall(r"(?:^\|.*\n)+", FENCE.sub("", text) + "\n", re.MULTILINE)
    return [[re.split(r"(?<!\\)\|", line)[1:-1] for line in table.splitlines()] for table in found]


def differences(english: str, chinese: str) -> Iterator[str]:
    """What one page has and the other has not, but for words and where links lead."""
    bare, theirs = FENCE.sub("", english), FENCE.sub("", chinese)
    if re.findall("^#+ ", bare, re.MULTILINE) != re.findall("^#+ ", theirs, re.MULTILINE):
        yield "headings"
    blocks, others = FENCE.findall(english), FENCE.findall(chinese)
    if [language for language, _ in blocks] != [language for language, _ in others]:
        yield "blocks"
    for (_, block), (_, other) in zip(blocks, others, strict=False):
        lines, translated = block.splitlines(), other.splitlines()
        if len(lines) != len(translated):
            yield f"a block of {len(lines)} lines, and of {len(translated)}: {translated[0]}"
        yield from (two for one, two in zip(lines, translated, strict=False) if not is_same_line(one, two))
    if [[len(row) for row in table] for table in tables(english)] != [
        [len(row) for row in table] for table in tables(chinese)
    ]:
        yield "rows and columns of tables"
    for table, other in zip(tables(english), tables(chinese), strict=False):
        for row, translated in zip(table, other, strict=False):
            for what in (NUMBER, CODE):
                cells = [
                    (Counter(what.findall(LINK.sub("]", one))), two) for one, two in zip(row, translated, strict=False)
                ]
                yield from (two for found, two in cells if found != Counter(what.findall(LINK.sub("]", two))))
    codes, there = set(CODE.findall(bare)), set(CODE.findall(theirs))
    yield from (f"`{code}` in one language" for code in sorted(codes ^ there))


def leads_to(root: Path, page: Path, *, is_translated: bool) -> Counter[str]:
    """Addresses and files that a page links to, but for the other language at its top."""
    found: Counter[str] = Counter()
    text = re.sub(r"\[(中文|English)\]\(\S+\)", "", FENCE.sub("", page.read_text(encoding="utf-8")), count=1)
    for target in LINK.findall(text):
        path, _, anchor = target.partition("#")
        if re.match("[a-z]+:", target):
            found[target] += 1
            continue
        if not path:  # a heading of the page itself, which has a name in each language
            found["a heading of this page"] += 1
            continue
        file = (page.parent / path).resolve()
        chinese = root / "docs" / "zh" / os.path.relpath(file, root / "docs")
        is_page = file.suffix == ".md" and not is_translated and chinese.exists()
        name = os.path.relpath(chinese if is_page else file, root)
        found[name if name.startswith("docs/zh/") else f"{name}#{anchor}"] += 1
    return found


def test_both_languages_have_the_same_code_and_numbers(root: Path) -> None:
    wrong: list[str] = []
    number = 0
    for page, translated in pairs(root):
        number += 1
        texts = page.read_text(encoding="utf-8"), translated.read_text(encoding="utf-8")
        wrong += [f"{translated.relative_to(root)}: {what}" for what in differences(*texts)]
    assert not wrong, "\n".join(["", *wrong])
    assert number >= 17


def test_both_languages_link_to_the_same_and_to_each_other(root: Path) -> None:
    """From a Chinese page to the Chinese one, where there is one."""
    for page, translated in pairs(root):
        name = translated.relative_to(root)
        assert leads_to(root, page, is_translated=False) == leads_to(root, translated, is_translated=True), name
        for one, label, other in ((page, "中文", translated), (translated, "English", page)):
            found = re.search(rf"\[{label}\]\((\S+)\)", "\n".join(one.read_text(encoding="utf-8").splitlines()[:4]))
            assert found is not None, one
            assert (one.parent / found[1]).resolve() == other


PAGE = """# A
Two words and `a flag`, [there](b.md).
```
everyrank comm --processes 2      # what it does
everyrank doctor                  what it says
loss = 1                          # a number
```
| is | was |
| --- | --- |
| `--new` 16 | 2.5 (2 to 3) |
"""
TRANSLATED = """# 甲
几个字和 `a flag`，[那里](b.md)。
```
everyrank comm --processes 2      # 做什么
everyrank doctor                  说什么
loss = 1                          # 一个数
```
| 现在 | 过去 |
| --- | --- |
| 16，即 `--new` | 2.5（2～3） |
"""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("# 甲", "## 甲"),
        ("a flag", "another"),
        ("--processes 2", "--processes 3"),
        ("everyrank doctor ", "everyrank docter "),
        ("everyrank doctor                  说什么\n", ""),
        ("loss = 1", "loss = 1 + 一"),
        ("--processes 2 ", "--processes 2 --async "),
        ("--processes 2 ", ""),
        ("everyrank doctor                  说什么", "说什么"),
        ("loss = 1                          # 一个数", "loss = 1"),
        ("16，", "17，"),
        ("--new", "--old"),
        ("2.5", "2.6"),
        ("～3", ""),
        ("| 16，即 `--new` | 2.5（2～3） |\n", ""),
        ("| 现在 | 过去 |", "| 现在 | 过去 | |"),
        ("```\n| ", "```\n```\n```\n| "),
    ],
)
def test_a_difference_is_found(old: str, new: str) -> None:
    assert list(differences(PAGE, TRANSLATED)) == []
    assert old in TRANSLATED
    assert list(differences(PAGE, TRANSLATED.replace(old, new, 1)))
