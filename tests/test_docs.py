"""The pages: links and anchors lead somewhere, all are in the navigation, pictures and examples are as the code is."""

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
    if not (repository / "CONTRIBUTING.md").exists():
        pytest.skip("a source distribution has no such pages")
    return repository


def pages(root: Path) -> Iterator[Path]:
    """Every Markdown file of the repository."""
    yield from sorted(root.glob("*.md"))
    for folder in ("docs", "benchmarks"):
        yield from sorted((root / folder).rglob("*.md"))


def anchors(text: str) -> set[str]:
    """Of each heading, as GitHub and the site name it: small letters, no punctuation, a hyphen for a space."""
    found: set[str] = set()
    for heading in HEADING.findall(FENCE.sub("", text)):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").lower()
        slug = re.sub(r"[^\w\- ]", "", words).strip().replace(" ", "-")
        found.add(next(name for number in range(99) if (name := f"{slug}-{number}" if number else slug) not in found))
    return found


def broken(page: Path, target: str) -> str:
    """What is wrong with a link of a page; "" where nothing is."""
    if re.match(r"(https?|mailto):", target):
        return ""
    path, _, anchor = target.partition("#")
    place = (page.parent / path).resolve() if path else page
    if not place.exists():
        return "no such file"
    if anchor and (place.suffix != ".md" or anchor not in anchors(place.read_text(encoding="utf-8"))):
        return "no such heading"
    return ""


def test_links_lead_somewhere(root: Path) -> None:
    wrong: list[str] = []
    number = 0
    for page in pages(root):
        for target in LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
            number += 1
            if why := broken(page, target):
                wrong.append(f"{page.relative_to(root)}: {target}: {why}")
    assert wrong == []
    assert number > 500


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("# A b\n[x](#a-b)", ""),
        ("# A\n## A\n[x](#a-1)", ""),
        ("# Two: `words`, 三\n[x](#two-words-三)", ""),
        ("[x](missing.md)", "no such file"),
        ("# A\n[x](#b)", "no such heading"),
        ("```\n# A\n```\n[x](#a)", "no such heading"),
    ],
)
def test_a_link_that_leads_nowhere_is_found(tmp_path: Path, text: str, why: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(text, encoding="utf-8")
    [target] = LINK.findall(text)
    assert broken(page, target) == why


def navigation(entry: Any) -> Iterator[str]:
    if isinstance(entry, str):
        yield entry
    else:
        for inner in entry.values() if isinstance(entry, dict) else entry:
            yield from navigation(inner)


def test_every_page_is_in_the_navigation_once(root: Path) -> None:
    """Decisions are reached from the pages that they explain."""
    docs = root / "docs"
    named = list(navigation(tomllib.loads((docs / "zensical.toml").read_text())["project"]["nav"]))
    there = {str(path.relative_to(docs)) for path in docs.rglob("*.md")}
    shown = {name for name in there if not name.startswith("decisions/")}
    assert len(named) == len(set(named))
    assert set(named) - {"index.md", "zh/index.md"} == shown


def test_the_site_has_what_its_pages_link_to(root: Path, tmp_path: Path) -> None:
    """Staged as Zensical gets them: files of the repository have become pages, and every link stays inside."""
    site = runpy.run_path(str(root / "docs" / "build_site.py"))
    number = site["stage"](tmp_path / "pages")
    staged = sorted((tmp_path / "pages").rglob("*.md"))
    assert number >= len(staged) > 100
    assert "def prepare(" in (tmp_path / "pages/repository/src/everyrank/strategies/ddp.py.md").read_text()
    for page in staged:
        for target in LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
            assert not broken(page, target), f"{page.relative_to(tmp_path)}: {target}"
            path = (page.parent / target.partition("#")[0]).resolve()
            assert re.match("[a-z]+:", target) or path.is_relative_to(tmp_path), (
                f"{page}: {target} leads out of the site"
            )


def test_options_and_intervals_stay_on_one_line(root: Path) -> None:
    """In sentences and tables. Blocks of code, and hyphens inside a word, are left alone."""
    kept = runpy.run_path(str(root / "docs" / "build_site.py"))["keep_on_one_line"]
    text = "<td><code>a.py --no-compare -m x-y</code> 2.0 (-1.5 to 2,000) 1（0.9～1.1）</td>"
    whole = re.findall('<span class="whole">(.*?)</span>', kept(text))
    assert whole == ["--no-compare", "-m", "(-1.5 to 2,000)", "（0.9～1.1）"]
    assert re.sub("</?span.*?>", "", kept(text)) == text
    block = "<pre><code>a.py --html f</code></pre>"
    assert kept(f"{block}{text}{block}").count(block) == 2


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


def test_numbers_beside_theirs_are_those_of_the_benchmarks(root: Path) -> None:
    """Intervals on the pages for people from elsewhere stand in docs/benchmarks.md, which says where they are from."""
    measured = (root / "docs" / "benchmarks.md").read_text()
    number = 0
    for page in (root / "docs" / "coming-from").glob("*.md"):
        for interval in re.findall(r"\d[\d.,]* \([\d.,]+ to\s[\d.,]+\)", page.read_text()):
            number += 1
            assert " ".join(interval.split()) in measured, f"{page.name}: {interval}"
    assert number > 10


def test_public_names_are_on_the_page(root: Path) -> None:
    page = (root / "docs" / "api.md").read_text()
    assert [name for name in everyrank.__all__ if f"::: everyrank.{name}\n" not in page] == []


def test_pictures_are_drawn_from_the_code(root: Path) -> None:
    images = root / "docs" / "images"
    drawn = runpy.run_path(str(root / "docs" / "pictures.py"))
    for name in ("mesh", "ranks"):
        assert (images / f"{name}.svg").read_text() == drawn[name]()
    report = (images / "report.svg").read_text()
    shown = [record.layout for record in drawn["read_records"](drawn["DIGITS"]) if record.parity.status == "equal"]
    assert len(shown) > 3
    assert [layout for layout in shown if f">{layout}<" not in report] == []


def words(text: str) -> str:
    """However lines are broken, and without rules and blanks."""
    return " ".join(text.replace("─", " ").split())


def test_the_first_example_of_the_readme(cli: Cli, root: Path) -> None:
    """A silent bug that audit names: the command and what it prints, except for "..." and the seconds."""
    block = (root / "README.md").read_text().partition("```\n$ everyrank audit")[2].partition("```")[0]
    command, _, shown = block.partition("\n")
    done = cli(root, "audit", *command.split())
    assert done.status == 1
    printed = re.sub(r"in \d+ s", "in N s", words(done.out))
    for text in re.sub(r"in \d+ s", "in N s", shown).split("...\n"):
        assert words(text) in printed


@pytest.mark.integration
@pytest.mark.timeout(500)  # ten commands, one after the other
def test_start_here(cli: Cli, root: Path, tmp_path: Path) -> None:
    """Everything on the page from "One device" on, by copying what stands there; one training is shorter."""
    page = (root / "docs" / "start.md").read_text().partition("## One device")[2]
    ran: list[str] = []
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
                done = cli(tmp_path, *line.replace("--epochs 60", "--epochs 13").split()[1:])
                assert done.status == (1 if "wrong.py" in line else 0), f"{line}\n{done.err}"
                ran.append(line)
    assert len(ran) == 10
    assert (tmp_path / "train_ddp.py").exists()
    assert "everyrank" not in (tmp_path / "train_ddp.py").read_text()
