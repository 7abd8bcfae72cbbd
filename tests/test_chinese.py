"""Chinese pages have the same headings, code, tables, numbers and links as the English pages."""

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
    """The root of the repository; a source distribution is skipped."""
    if not (repository / "CONTRIBUTING.md").exists():
        pytest.skip("a source distribution has no such pages")
    return repository


def pairs(root: Path) -> Iterator[tuple[Path, Path]]:
    """Yield (English page, Chinese page)."""
    yield root / "README.md", root / "README.zh.md"
    for page in sorted((root / "docs" / "zh").rglob("*.md")):
        yield root / "docs" / page.relative_to(root / "docs" / "zh"), page


def is_same_line(english: str, chinese: str) -> bool:
    """Return whether a line of a code block is the same, except for an explanation.

    An explanation begins after two spaces, or is a comment or docstring.
    """
    english, chinese = (re.sub(r"<[^\x00-\x7f]+>|<this repository>", "<>", line) for line in (english, chinese))
    first = CHINESE.search(chinese)
    if first is None:
        return english == chinese
    begins = max(chinese.rfind(mark, 0, first.start()) for mark in ("  ", "# ", '"""'))
    code = chinese[: max(begins, 0)].rstrip()
    explanation = english.removeprefix(code)
    return english.startswith(code) and re.match(r'  |\s*# |\s*"""', explanation) is not None


def tables(text: str) -> list[list[list[str]]]:
    """Return the cells of each row of each table."""
    table_texts = re.findall(r"(?:^\|.*\n)+", FENCE.sub("", text) + "\n", re.MULTILINE)
    return [[re.split(r"(?<!\\)\|", line)[1:-1] for line in table.splitlines()] for table in table_texts]


def differences(english: str, chinese: str) -> Iterator[str]:
    """Yield differences between two pages, except for prose and link targets."""
    english_prose, chinese_prose = FENCE.sub("", english), FENCE.sub("", chinese)
    if re.findall("^#+ ", english_prose, re.MULTILINE) != re.findall("^#+ ", chinese_prose, re.MULTILINE):
        yield "headings"
    english_blocks, chinese_blocks = FENCE.findall(english), FENCE.findall(chinese)
    if [language for language, _ in english_blocks] != [language for language, _ in chinese_blocks]:
        yield "blocks"
    for (_, english_block), (_, chinese_block) in zip(english_blocks, chinese_blocks, strict=False):
        lines, translated = english_block.splitlines(), chinese_block.splitlines()
        if len(lines) != len(translated):
            yield f"a block of {len(lines)} lines, and of {len(translated)}: {translated[0]}"
        yield from (
            chinese_text
            for english_text, chinese_text in zip(lines, translated, strict=False)
            if not is_same_line(english_text, chinese_text)
        )
    if [[len(row) for row in table] for table in tables(english)] != [
        [len(row) for row in table] for table in tables(chinese)
    ]:
        yield "rows and columns of tables"
    for table, chinese_table in zip(tables(english), tables(chinese), strict=False):
        for row, translated in zip(table, chinese_table, strict=False):
            for pattern in (NUMBER, CODE):
                cells = [
                    (Counter(pattern.findall(LINK.sub("]", english_text))), chinese_text)
                    for english_text, chinese_text in zip(row, translated, strict=False)
                ]
                yield from (
                    chinese_text
                    for expected_counts, chinese_text in cells
                    if expected_counts != Counter(pattern.findall(LINK.sub("]", chinese_text)))
                )
    english_codes, chinese_codes = set(CODE.findall(english_prose)), set(CODE.findall(chinese_prose))
    yield from (f"`{code}` in one language" for code in sorted(english_codes ^ chinese_codes))


def link_targets(root: Path, page: Path, *, is_translated: bool) -> Counter[str]:
    """Count the addresses and files that a page links to, except for the link to the other language."""
    targets: Counter[str] = Counter()
    text = re.sub(r"\[(中文|English)\]\(\S+\)", "", FENCE.sub("", page.read_text(encoding="utf-8")), count=1)
    for target in LINK.findall(text):
        path, _, anchor = target.partition("#")
        if re.match("[a-z]+:", target):
            targets[target] += 1
            continue
        if not path:  # a heading of the page itself, which has a name in each language
            targets["a heading of this page"] += 1
            continue
        file = (page.parent / path).resolve()
        chinese = root / "docs" / "zh" / os.path.relpath(file, root / "docs")
        is_page = file.suffix == ".md" and not is_translated and chinese.exists()
        name = os.path.relpath(chinese if is_page else file, root)
        targets[name if name.startswith("docs/zh/") else f"{name}#{anchor}"] += 1
    return targets


def test_both_languages_have_the_same_code_and_numbers(root: Path) -> None:
    errors: list[str] = []
    num_pages = 0
    for page, translated in pairs(root):
        num_pages += 1
        texts = page.read_text(encoding="utf-8"), translated.read_text(encoding="utf-8")
        errors += [f"{translated.relative_to(root)}: {difference}" for difference in differences(*texts)]
    assert not errors, "\n".join(["", *errors])
    assert num_pages >= 17


def test_both_languages_have_the_same_links_and_link_to_each_other(root: Path) -> None:
    """A Chinese page links to the Chinese version of a page if there is one."""
    for page, translated in pairs(root):
        name = translated.relative_to(root)
        assert link_targets(root, page, is_translated=False) == link_targets(root, translated, is_translated=True), name
        for source, label, destination in ((page, "中文", translated), (translated, "English", page)):
            link = re.search(rf"\[{label}\]\((\S+)\)", "\n".join(source.read_text(encoding="utf-8").splitlines()[:4]))
            assert link is not None, source
            assert (source.parent / link[1]).resolve() == destination


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
def test_every_kind_of_difference_is_detected(old: str, new: str) -> None:
    assert list(differences(PAGE, TRANSLATED)) == []
    assert old in TRANSLATED
    assert list(differences(PAGE, TRANSLATED.replace(old, new, 1)))
