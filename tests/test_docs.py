"""Documentation pages: links and anchors, navigation, images, numbers and examples."""

from __future__ import annotations

import re
import runpy
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import everyrank
from processes import Cli

FENCE = re.compile(r"^(```+).*?^\1\s*$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#{1,6} (.+?)\s*$", re.MULTILINE)


@pytest.fixture
def root(repository: Path) -> Path:
    """The root of the repository; a source distribution is skipped."""
    if not (repository / "CONTRIBUTING.md").exists():
        pytest.skip("a source distribution has no such pages")
    return repository


def pages(root: Path) -> Iterator[Path]:
    """Yield every Markdown file of the repository."""
    yield from sorted(root.glob("*.md"))
    for folder in ("docs", "benchmarks"):
        yield from sorted((root / folder).rglob("*.md"))


def anchors(text: str) -> set[str]:
    """Return the anchor of each heading, as GitHub and the site generate it."""
    slugs: set[str] = set()
    for heading in HEADING.findall(FENCE.sub("", text)):
        heading_text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").lower()
        slug = re.sub(r"[^\w\- ]", "", heading_text).strip().replace(" ", "-")
        slugs.add(next(name for number in range(99) if (name := f"{slug}-{number}" if number else slug) not in slugs))
    return slugs


def link_error(page: Path, target: str) -> str:
    """Return the error of a link of a page, or ""."""
    if re.match(r"(https?|mailto):", target):
        return ""
    path, _, anchor = target.partition("#")
    target_path = (page.parent / path).resolve() if path else page
    if not target_path.exists():
        return "no such file"
    if anchor and (target_path.suffix != ".md" or anchor not in anchors(target_path.read_text(encoding="utf-8"))):
        return "no such heading"
    return ""


def test_links_have_a_target(root: Path) -> None:
    errors: list[str] = []
    number = 0
    for page in pages(root):
        for target in LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
            number += 1
            if reason := link_error(page, target):
                errors.append(f"{page.relative_to(root)}: {target}: {reason}")
    assert errors == []
    assert number > 500


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("# A b\n[x](#a-b)", ""),
        ("# A\n## A\n[x](#a-1)", ""),
        ("# Two: `words`, 三\n[x](#two-words-三)", ""),
        ("[x](missing.md)", "no such file"),
        ("# A\n[x](#b)", "no such heading"),
        ("```\n# A\n```\n[x](#a)", "no such heading"),
    ],
)
def test_link_error_finds_missing_files_and_headings(tmp_path: Path, text: str, expected: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(text, encoding="utf-8")
    [target] = LINK.findall(text)
    assert link_error(page, target) == expected


def navigation(entry: Any) -> Iterator[str]:
    """Yield the pages of an entry of the navigation."""
    if isinstance(entry, str):
        yield entry
    else:
        for inner in entry.values() if isinstance(entry, dict) else entry:
            yield from navigation(inner)


def test_every_page_is_in_the_navigation_once(root: Path) -> None:
    """Decisions are excluded: the pages that they explain link to them."""
    docs = root / "docs"
    pages_in_navigation = list(navigation(tomllib.loads((docs / "zensical.toml").read_text())["project"]["nav"]))
    all_pages = {str(path.relative_to(docs)) for path in docs.rglob("*.md")}
    expected_pages = {name for name in all_pages if not name.startswith("decisions/")}
    assert len(pages_in_navigation) == len(set(pages_in_navigation))
    assert set(pages_in_navigation) - {"index.md", "zh/index.md"} == expected_pages


def test_links_of_the_staged_site_stay_inside_the_site(root: Path, tmp_path: Path) -> None:
    """Staging for Zensical copies linked files of the repository as pages."""
    site = runpy.run_path(str(root / "docs" / "build_site.py"))
    number = site["stage"](tmp_path / "pages")
    staged = sorted((tmp_path / "pages").rglob("*.md"))
    assert number >= len(staged) > 100
    assert "def prepare(" in (tmp_path / "pages/repository/src/everyrank/strategies/ddp.py.md").read_text()
    for page in staged:
        for target in LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
            assert not link_error(page, target), f"{page.relative_to(tmp_path)}: {target}"
            path = (page.parent / target.partition("#")[0]).resolve()
            assert re.match("[a-z]+:", target) or path.is_relative_to(tmp_path), (
                f"{page}: {target} leads out of the site"
            )


def test_flags_and_intervals_are_not_broken_over_lines(root: Path) -> None:
    """This applies to sentences and tables, but not to code blocks or hyphens inside a word."""
    keep_on_one_line = runpy.run_path(str(root / "docs" / "build_site.py"))["keep_on_one_line"]
    text = "<td><code>a.py --no-compare -m x-y</code> 2.0 (-1.5 to 2,000) 1（0.9～1.1）</td>"
    unbroken = re.findall('<span class="whole">(.*?)</span>', keep_on_one_line(text))
    assert unbroken == ["--no-compare", "-m", "(-1.5 to 2,000)", "（0.9～1.1）"]
    assert re.sub("</?span.*?>", "", keep_on_one_line(text)) == text
    block = "<pre><code>a.py --html f</code></pre>"
    assert keep_on_one_line(f"{block}{text}{block}").count(block) == 2


def test_each_staged_page_names_its_language_and_translation(root: Path) -> None:
    site = runpy.run_path(str(root / "docs" / "build_site.py"))
    matter, translation = site["front_matter"], site["translation"]
    assert 'language: "zh"' in matter(Path("zh/start.md"))
    assert 'translation: "start/"' in matter(Path("zh/start.md"))
    assert 'translation: "zh/coming-from/"' in matter(Path("coming-from/README.md"))
    assert 'translation: "zh/"' in matter(Path("index.md"))
    assert "translation" not in matter(Path("decisions/0001-step-takes-micro-batches.md"))
    chinese = [path.relative_to(root / "docs") for path in (root / "docs" / "zh").rglob("*.md")]
    assert [path for path in chinese if translation(path) is None] == []


def test_intervals_in_coming_from_pages_are_in_benchmarks_md(root: Path) -> None:
    """docs/benchmarks.md gives their source."""
    measured = (root / "docs" / "benchmarks.md").read_text()
    number = 0
    for page in (root / "docs" / "coming-from").glob("*.md"):
        for interval in re.findall(r"\d[\d.,]* \([\d.,]+ to\s[\d.,]+\)", page.read_text()):
            number += 1
            assert " ".join(interval.split()) in measured, f"{page.name}: {interval}"
    assert number > 10


def test_every_public_name_is_in_api_md(root: Path) -> None:
    page = (root / "docs" / "api.md").read_text()
    assert [name for name in everyrank.__all__ if f"::: everyrank.{name}\n" not in page] == []


def test_images_are_up_to_date(root: Path) -> None:
    images = root / "docs" / "images"
    pictures = runpy.run_path(str(root / "docs" / "pictures.py"))
    for name in ("mesh", "ranks"):
        assert (images / f"{name}.svg").read_text() == pictures[name]()
    report = (images / "report.svg").read_text()
    equal_layouts = [
        record.layout for record in pictures["read_records"](pictures["DIGITS"]) if record.parity.status == "equal"
    ]
    assert len(equal_layouts) > 3
    assert [layout for layout in equal_layouts if f">{layout}<" not in report] == []


def normalized(text: str) -> str:
    """Return the text without rules and line breaks, and with single spaces."""
    return " ".join(text.replace("─", " ").split())


def test_first_example_of_the_readme(cli: Cli, root: Path) -> None:
    """The command prints the shown text, except for "..." and the seconds."""
    block = (root / "README.md").read_text().partition("```\n$ everyrank audit")[2].partition("```")[0]
    command, _, shown_output = block.partition("\n")
    ended = cli(root, "audit", *command.split())
    assert ended.status == 1
    printed = re.sub(r"in \d+ s", "in N s", normalized(ended.out))
    printed = printed.replace("--fix --no-compare ", "--fix ")  # an option of these tests (processes.py)
    for text in re.sub(r"in \d+ s", "in N s", shown_output).split("...\n"):
        assert normalized(text) in printed


@pytest.mark.integration
@pytest.mark.timeout(500)  # ten commands in sequence
def test_commands_of_start_md(cli: Cli, root: Path, tmp_path: Path) -> None:
    """All commands from "One device" on run as they are on the page, but one training has fewer epochs."""
    page = (root / "docs" / "start.md").read_text().partition("## One device")[2]
    commands_run: list[str] = []
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
        if language == "python":
            name = re.match(r"# (\S+)\n", block)
            assert name is not None
            (tmp_path / name[1]).write_text(block)
        for line in block.splitlines() if not language else ():
            if line.startswith("sed "):
                text = (tmp_path / "my_workload.py").read_text()
                old, new = line.split("/")[1:3]
                assert old in text
                (tmp_path / "wrong.py").write_text(text.replace(old, new))
            elif line.startswith("everyrank "):
                ended = cli(tmp_path, *line.replace("--epochs 60", "--epochs 13").split()[1:])
                assert ended.status == (1 if "wrong.py" in line else 0), f"{line}\n{ended.err}"
                commands_run.append(line)
    assert len(commands_run) == 10
    assert (tmp_path / "train_ddp.py").exists()
    assert "everyrank" not in (tmp_path / "train_ddp.py").read_text()
