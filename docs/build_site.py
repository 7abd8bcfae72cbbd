"""Build the documentation site from the pages as they stand in the repository.

    python docs/build_site.py [--out build/docs]        needs the extra `docs`; `make docs` installs it

Pages link to files of the repository as GitHub shows them: `../src/everyrank/strategies/ddp.py`. A site has only
what is in it, so each file that a page links to becomes a page, too: code in a code block, a folder as the list of its
files, a Record (JSON) as it is. README.md is the first page, README.zh.md the first of the Chinese ones. Zensical then
builds with `--strict`: a link or an anchor that leads nowhere ends it.

In the built pages, an option in a sentence (`--processes`) and an interval in a table stay on one line. A browser may
break a line after every hyphen and blank.

docs/theme has the three templates that differ from Zensical's: each page has a language, a navigation in it, and a link
to its translation. A Chinese page is the translation of the English one with the same path outside of docs/zh.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
THEME = ROOT / "docs" / "theme"
CONFIGURATION = ROOT / "docs" / "zensical.toml"
LINK = re.compile(r"(?<!\\)(\]\()([^)\s#]+)(#[^)\s]*)?\)")
CODE = re.compile(r"(^```.*?^```$|`[^`\n]+`)", re.MULTILINE | re.DOTALL)
FRONT = {Path("README.md"): Path("index.md"), Path("README.zh.md"): Path("zh/index.md")}
TITLES = {
    Path("index.md"): "Distributed PyTorch training that checks its own numbers",
    Path("zh/index.md"): "分布式训练，跑得起来还要算得对",
}
COPIED = {".json", ".png", ".svg", ".css"}
BLOCK = re.compile(r"(<pre\b.*?</pre>)", re.DOTALL)
INLINE_CODE = re.compile(r"(<code>)([^<]*-[^<]*)(</code>)")
OPTION = re.compile(r"(?<![\w-])--?[a-z][\w-]*")
INTERVAL = re.compile(r"\(-?[\d.,]+%? to -?[\d.,]+%?\)|（-?[\d.,]+%?～-?[\d.,]+%?）")


def place(path: Path) -> Path:
    """Where on the site a file or folder of the repository is; both paths relative to their roots."""
    if path in FRONT:
        return FRONT[path]
    if path.parts[0] == "docs" and (ROOT / path).is_file() and (path.suffix == ".md" or path.suffix in COPIED):
        return path.relative_to("docs")
    where = Path("repository") / path
    if (ROOT / path).is_dir():
        return where / "index.md"
    return where if path.suffix == ".md" or path.suffix in COPIED else where.with_name(f"{where.name}.md")


def linked(text: str, path: Path) -> tuple[str, set[Path]]:
    """The text of a page with links as the site has them, and which files they lead to. Code is left alone."""
    found: set[Path] = set()

    def renewed(match: re.Match[str]) -> str:
        opening, target, anchor = match[1], match[2], match[3] or ""
        if re.match(r"[a-z]+:", target):
            return match[0]
        leads_to = Path(os.path.normpath(path.parent / target))
        if not (ROOT / leads_to).exists():
            return match[0]  # Zensical says so
        found.add(leads_to)
        return f"{opening}{os.path.relpath(place(leads_to), place(path).parent)}{anchor})"

    parts = CODE.split(text)
    # a table may have a link whose words are code, so only blocks are left out, not the words of a link
    return "".join(part if part.startswith("```") else LINK.sub(renewed, part) for part in _joined(parts)), found


def _joined(parts: list[str]) -> list[str]:
    """Blocks by themselves, and all between them in one piece each."""
    pieces: list[str] = [""]
    for part in parts:
        if part.startswith("```"):
            pieces += [part, ""]
        else:
            pieces[-1] += part
    return pieces


def page(path: Path) -> tuple[str, set[Path]]:
    """What the site shows of a file or folder, and which files that leads to."""
    full = ROOT / path
    if full.is_dir():
        names = sorted(
            f"- `{each.name}{'/' if each.is_dir() else ''}`" for each in full.iterdir() if each.name[0] != "_"
        )
        return "\n".join([f"# {path}", "", "In the repository:", "", *names, ""]), set()
    text = full.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return linked(text, path)
    language = {".py": "python", ".sh": "bash", ".toml": "toml"}.get(path.suffix, "text")
    return f"# {path.name}\n\n`{path}` in the repository:\n\n````{language}\n{text}\n````\n", set()


def translation(path: Path) -> Path | None:
    """The same page in the other language, relative to the root of the site; None where there is none."""
    other = path.relative_to("zh") if path.parts[0] == "zh" else Path("zh") / path
    source = next((source for source, target in FRONT.items() if target == other), Path("docs") / other)
    return other if (ROOT / source).is_file() else None


def front_matter(path: Path) -> str:
    """Language, title and translation of a page, for the templates; `path` is relative to the root of the site."""
    fields = {"language": "zh" if path.parts[0] == "zh" else "en"}
    if path in TITLES:
        fields["title"] = TITLES[path]
    other = translation(path)
    if other is not None:
        is_index = other.name in ("index.md", "README.md")
        fields["translation"] = f"{(other.parent if is_index else other.with_suffix('')).as_posix()}/"
    return "\n".join(["---", *(f'{name}: "{value}"' for name, value in fields.items()), "---", "", ""])


def stage(folder: Path) -> int:
    """Write every page, and all that they lead to; how many."""
    waiting = {*FRONT, *(path.relative_to(ROOT) for path in (ROOT / "docs").rglob("*.md"))}
    waiting |= {path.relative_to(ROOT) for path in (ROOT / "docs").rglob("*.css")}
    done: set[Path] = set()
    while waiting:
        path = waiting.pop()
        done.add(path)
        target = folder / place(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix in COPIED:
            shutil.copy(ROOT / path, target)
            continue
        text, found = page(path)
        target.write_text(front_matter(place(path)) + text, encoding="utf-8")
        waiting |= found - done
    return len(done)


def keep_on_one_line(page: str) -> str:
    """HTML with options in inline code, and intervals, in spans of class `whole`."""

    def marked(match: re.Match[str]) -> str:
        return f'<span class="whole">{match[0]}</span>'

    def with_options(match: re.Match[str]) -> str:
        return match[1] + OPTION.sub(marked, match[2]) + match[3]

    parts = BLOCK.split(page)
    return "".join(
        part if part.startswith("<pre") else INTERVAL.sub(marked, INLINE_CODE.sub(with_options, part)) for part in parts
    )


def main() -> int:
    """Stage the pages and build the site; the exit status is that of Zensical."""
    parser = argparse.ArgumentParser(prog="docs/build_site.py", description="Build the documentation site.")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "docs", metavar="DIR")
    out: Path = parser.parse_args().out
    shutil.rmtree(out, ignore_errors=True)
    number = stage(out / "pages")
    configuration = (
        CONFIGURATION.read_text(encoding="utf-8").replace("SOURCES", str(ROOT / "src")).replace("THEME", str(THEME))
    )
    (out / "zensical.toml").write_text(configuration, encoding="utf-8")
    program = shutil.which("zensical", path=str(Path(sys.executable).parent)) or "zensical"
    command = [program, "build", "--strict", "--clean", "--config-file", str(out / "zensical.toml")]
    try:
        status = subprocess.run(command, check=False).returncode  # noqa: S603
    except FileNotFoundError:
        print(
            "docs/build_site.py: zensical is not installed here: pip install -e '.[docs]', or make docs",
            file=sys.stderr,
        )
        return 3
    if status == 0:
        for path in (out / "site").rglob("*.html"):
            path.write_text(keep_on_one_line(path.read_text(encoding="utf-8")), encoding="utf-8")
        print(f"{number} pages and files: {out / 'site' / 'index.html'}")
    return status


if __name__ == "__main__":
    sys.exit(main())
