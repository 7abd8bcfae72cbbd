"""The documentation site in a real browser: pages load and fit, and search and language links work."""

from __future__ import annotations

import functools
import http.server
import os
import shutil
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.timeout(500)]

REPOSITORY = Path(__file__).parents[2]
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
# pictures, tables and code that reach beyond the window and cannot be scrolled into it
CUT_OFF = """() => [...document.querySelectorAll("article :is(pre, table, img, svg)")].filter(element => {
    if (element.getBoundingClientRect().right <= window.innerWidth + 1) return false
    for (let outer = element.parentElement; outer; outer = outer.parentElement)
        if (["auto", "scroll"].includes(getComputedStyle(outer).overflowX)) return false
    return true
}).map(element => element.outerHTML.slice(0, 80))"""


class _Handler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments: Any) -> None:
        """Print nothing."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the address of the site. The output of `make docs` is used if it is newer than all pages and sources."""
    if not (REPOSITORY / "CONTRIBUTING.md").exists():
        pytest.skip("a source distribution has no such pages")
    if shutil.which("zensical", path=str(Path(sys.executable).parent)) is None:
        pytest.skip("not verified here: needs Zensical (make .venv/installed-docs)")
    folder = REPOSITORY / "build" / "docs"
    if not is_newest(folder / "site" / "index.html"):
        folder = tmp_path_factory.mktemp("docs")
        command = [sys.executable, str(REPOSITORY / "docs" / "build_site.py"), "--out", str(folder)]
        built = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert built.returncode == 0, built.stdout + built.stderr
    handler = functools.partial(_Handler, directory=str(folder / "site"))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


def is_newest(built: Path) -> bool:
    """Return whether the file is newer than all files that pages are generated from."""
    folders = [REPOSITORY / name for name in ("docs", "src", "benchmarks")]
    sources = [*REPOSITORY.glob("*.md"), *(path for folder in folders for path in folder.rglob("*") if path.is_file())]
    changed = max(path.stat().st_mtime for path in sources if path.suffix != ".pyc")
    return built.exists() and built.stat().st_mtime > changed


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Yield a headless Chromium."""
    playwright = pytest.importorskip("playwright.sync_api", reason="not verified here: needs Playwright")
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip("not verified here: needs Chromium")
    with playwright.sync_playwright() as driver:
        # Chromium has no sandbox for root
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        chromium = driver.chromium.launch(executable_path=path, args=arguments)
        yield chromium
        chromium.close()


def addresses() -> list[str]:
    """Return the address of each page of the navigation, relative to the site."""

    def names(entry: Any) -> Iterator[str]:
        if isinstance(entry, str):
            yield entry
        else:
            for inner in entry.values() if isinstance(entry, dict) else entry:
                yield from names(inner)

    nav = tomllib.loads((REPOSITORY / "docs" / "zensical.toml").read_text())["project"]["nav"]
    return [name.removesuffix(".md").removesuffix("index").removesuffix("README").rstrip("/") for name in names(nav)]


def is_aborted(request: Any) -> bool:
    """Return whether the next page aborted what the last one was still loading, or the test the index of the search."""
    return request.failure == "net::ERR_ABORTED" or request.url.endswith("/search.json")


def test_pages_load_and_fit_wide_and_narrow_windows(site: str, browser: Any) -> None:
    """Each page is loaded once and then resized, without the index of the search, which takes half of the time."""
    page = browser.new_page()
    page.route("**/search.json", lambda route: route.abort())
    failed: list[str] = []
    page.on("requestfailed", lambda request: None if is_aborted(request) else failed.append(request.url))
    page.on("response", lambda response: failed.append(response.url) if response.status >= 400 else None)
    page.on("request", lambda request: None if request.url.startswith((site, "data:")) else failed.append(request.url))
    wrong: list[str] = []
    for name in addresses():
        page.goto(f"{site}{name}/".replace("//", "/").replace(":/", "://"))
        for width in (1280, 420):
            page.set_viewport_size({"width": width, "height": 900})
            if page.evaluate("document.documentElement.scrollWidth") > width:
                wrong.append(f"{name}: wider than a window of {width}")
            wrong += [f"{name}: cut off at {width}: {element}" for element in page.evaluate(CUT_OFF)]
        language = "zh" if f"{name}/".startswith("zh/") else "en"
        if page.evaluate("document.documentElement.lang") != language:
            wrong.append(f"{name}: lang is not {language}")
        if page.title() in ("everyrank", "everyrank - everyrank"):
            wrong.append(f"{name}: its title is {page.title()}")
    page.close()
    assert wrong == []
    assert failed == []


def test_search_finds_audit(site: str, browser: Any) -> None:
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(site)
    page.locator(".md-search__button").click()
    page.keyboard.type("audit")
    page.locator("a[href*='h=audit']").first.click(timeout=20_000)
    page.wait_for_url("**/audit/**")
    page.close()


def test_language_links_lead_to_the_translation_and_back(site: str, browser: Any) -> None:
    page = browser.new_page(viewport={"width": 420, "height": 900})
    page.goto(f"{site}start/")
    page.locator("header a[hreflang=zh]").click()
    assert page.url == f"{site}zh/start/"
    page.locator("header a[hreflang=en]").click()
    assert page.url == f"{site}start/"
    page.close()


def test_elements_wider_than_the_window_are_detected(browser: Any) -> None:
    page = browser.new_page(viewport={"width": 420, "height": 900})
    wide = '<pre style="width: 600px">code</pre>'
    page.set_content(f"<article>{wide}</article>")
    assert len(page.evaluate(CUT_OFF)) == 1
    page.set_content(f'<article><div style="overflow-x: auto">{wide}</div></article>')
    assert page.evaluate(CUT_OFF) == []
    page.close()
