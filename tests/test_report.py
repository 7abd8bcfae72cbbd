"""Reports: only verified layouts show numbers, text in a Record is never run or loaded, each layout has a curve."""

import dataclasses
import html
import html.parser
import math
import re
import shutil
import signal
import subprocess
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from everyrank.audit import Audit, Finding
from everyrank.cli import main
from everyrank.record import (
    Breakdown,
    Collective,
    Interval,
    Parity,
    Record,
    Resources,
    Scaling,
    read_records,
    write_records,
)
from everyrank.report import audit_page, charts

SVG = "{http://www.w3.org/2000/svg}"
EQUAL = Parity("equal", bitwise=True, max_relative_difference=0.0, tolerance=1e-10)
DIFFERENT = Parity(
    "different",
    bitwise=False,
    max_relative_difference=0.5,
    tolerance=1e-10,
    first_divergence="update 3, tensor layers.0.weight (float64)",
    cause="sum where the mean is meant",
)
NOT_VERIFIED = Parity("not_verified", reason="needs 2 CUDA devices")


def timed(layout: str, parity: Parity, digits: int = 7, workload: str = "mine", **values: object) -> Record:
    """Return a Record with every measurement. All its numbers repeat `digits`, so that a test can find them."""
    speed, step = float(f"{digits}" * 6), float(f"0.0{digits}{digits}{digits}{digits}")
    base = Record(
        workload=workload,
        layout=layout,
        launcher="spawn",
        backend="gloo",
        device="cpu",
        world_size=2,
        parity=parity,
        throughput_samples_per_second=Interval(speed, speed, speed, trials=5),
        step_seconds=Interval(step, step, step, trials=5),
        epoch_seconds=float(f"{digits}" * 5),
        metrics={"top1": float(f"0.{digits}{digits}{digits}{digits}"), "eval_loss": float(f"{digits}" * 4)},
        breakdown_seconds=Breakdown(step, 2 * step, 3 * step, 4 * step, 5 * step, error=step),
        peak_memory_bytes=int(f"{digits}" * 4) * 2**20,
        collectives=[Collective("all_reduce", "replicate", digits, int(f"{digits}" * 4) * 2**10)],
        startup_seconds=float(f"{digits}" * 3),
        first_step_seconds=step,
        resources=Resources(0.5, [1.0, 1.5], [99.0, 98.0], [2**30, 2**30]),
        loss=[2.0 / (i + 1) for i in range(20)],
        provenance={"torch": "2.13.0", "global_batch": 64, "cores": 2, "method": "medians", "command": ["x"]},
    )
    return dataclasses.replace(base, **values)  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True)
class Report:
    """The outputs of `everyrank report`."""

    terminal: str
    markdown: str
    html: str

    def __iter__(self) -> Iterator[str]:
        """Yield the visible text of each output, without file paths and chart coordinates."""
        lines = [line for line in self.terminal.splitlines() if not line.startswith("wrote ")]
        return iter(("\n".join(lines), self.markdown, Page(self.html).text))


_REPORT_CACHE: dict[str, Report] = {}  # cache by content, because drawing charts is slow


@pytest.fixture
def report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[..., Report]]:
    """A function that writes each list of Records to a file and returns the outputs of `everyrank report`."""
    before = signal.getsignal(signal.SIGTERM)

    def call(*files: list[Record]) -> Report:
        key = repr((files, charts.CHARTS))
        if key in _REPORT_CACHE:
            return _REPORT_CACHE[key]
        paths = [tmp_path / f"{index}.json" for index in range(len(files))]
        for path, records in zip(paths, files, strict=True):
            write_records(records, path)
        html_path, markdown_path = tmp_path / "page.html", tmp_path / "table.md"
        status = main(["report", *map(str, paths), "--html", str(html_path), "--markdown", str(markdown_path)])
        captured = capsys.readouterr()
        assert status == 0, captured.err
        assert captured.err == ""
        _REPORT_CACHE[key] = Report(
            captured.out, markdown_path.read_text(encoding="utf-8"), html_path.read_text(encoding="utf-8")
        )
        return _REPORT_CACHE[key]

    yield call
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def report_without_charts(report: Callable[..., Report], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Report]:
    """`report` without charts, for tests that check only the tables and the lines below them."""
    monkeypatch.setattr(charts, "CHARTS", ())
    monkeypatch.setattr(charts, "beside", lambda _: "")
    return report


class Page(html.parser.HTMLParser):
    """A parsed HTML page: its tags with their attributes, its text and its comments."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.text = ""
        self.comments = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))

    def handle_data(self, data: str) -> None:
        self.text += data

    def handle_comment(self, data: str) -> None:
        self.comments += data


def svgs(text: str, kind: str = "losses") -> list[ET.Element]:
    """Return the charts of one kind in a page. Every chart in the page must be well-formed XML."""
    for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        ET.fromstring(svg)
    figures = re.findall(rf'<figure class="{kind}">.*?(<svg.*?</svg>)', text, re.DOTALL)
    return [ET.fromstring(figure) for figure in figures]


def curves(svg: ET.Element) -> list[ET.Element]:
    """Return the data lines of the upper axes, without ticks and legend."""
    [axes] = [group for group in svg.iter(f"{SVG}g") if group.get("id") == "axes_1"]
    lines = [group for group in axes.findall(f"{SVG}g") if group.get("id", "").startswith("line2d_")]
    return [path for line in lines for path in line.findall(f"{SVG}path")]


def table_rows(text: str) -> list[list[str]]:
    """Return the cells of each row of the first table in a Markdown text, split as GitHub splits them."""
    lines = [line for line in text.partition("\n\n")[2].partition("\n\n")[0].splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def test_equivalent_layouts_show_all_numbers(report: Callable[..., Report]) -> None:
    """This shows that the searches for numbers work. Other tests use them to check that numbers are absent."""
    shown = report([timed("single", EQUAL, 5), timed("ddp", EQUAL, 7)])
    for text in shown:
        assert "777,777" in text  # samples a second
        assert "77.77" in text  # step ms
        assert "77777.00" in text  # epoch s
        assert "0.7777" in text  # top1
        assert "7777.0000" in text  # eval loss
        assert "1.40" in text  # x single
        assert "equal" in text
        assert "7,777.0" in text  # KiB an update
        assert "7777.0" in text  # MiB
        assert "7 all-reduce" in text
        assert "388.85" in text  # ms of exposed communication: 5 times the step time
    assert len(table_rows(shown.markdown)) == 4
    kinds = ("throughput", "split", "memory", "traffic", "losses", "resources")
    assert all(len(svgs(shown.html, kind)) == 1 for kind in kinds)


def scaled(layout: str, size: int, kind: str, efficiency: float, **values: object) -> Record:
    """Return a Record with a scaling efficiency."""
    spread = Interval(efficiency, efficiency / 2, efficiency * 2, trials=5)
    return timed(layout, EQUAL, 3, world_size=size, scaling=Scaling(kind, spread), **values)


def test_ratio_of_paired_trials_is_shown_with_its_interval(report: Callable[..., Report]) -> None:
    """The interval is that of the paired trials. It is not shown if `single` was not verified as equal."""
    paired = Interval(1.41, 1.39, 1.43, trials=5)
    records = [timed("single", EQUAL, 5), timed("ddp", EQUAL, 7, ratio_to_single=paired)]
    for text in report(records):
        assert "1.41 (1.39 to 1.43)" in text
    for text in report([timed("single", DIFFERENT, 5), records[1]]):
        assert "1.41" not in text


def test_scaling_has_a_table_and_a_chart(report: Callable[..., Report]) -> None:
    """Strong and weak scaling are in one table. Weak scaling has a larger batch, but gets no table of its own."""
    weak_provenance = {**timed("ddp", EQUAL).provenance, "global_batch": 128}
    records = [
        timed("ddp", EQUAL, 5, world_size=1),
        scaled("ddp", 2, "strong", 0.61),
        scaled("ddp", 2, "weak", 0.83, provenance=weak_provenance),
    ]
    shown = report(records)
    assert len(svgs(shown.html, "scaling")) == 1
    for text in shown:
        assert "0.61" in text
        assert "0.83" in text
        assert "efficiency relative to one rank" in text
        assert text.count("global batch 64") == 1
        assert "global batch 128" not in text
    not_equal = dataclasses.replace(records[1], parity=DIFFERENT)
    assert all("0.61" not in text for text in report([records[0], not_equal]))


def test_a_layout_has_the_same_colour_in_all_charts(report: Callable[..., Report]) -> None:
    """This holds even if a chart leaves out an earlier layout. Here `single` has no samples of its resources."""
    shown = report([timed("single", EQUAL, 5, resources=None), timed("ddp", EQUAL, 7)])
    single, ddp = "#0072b2", "#e69f00"
    for kind in ("throughput", "memory", "losses"):
        text = ET.tostring(svgs(shown.html, kind)[0], encoding="unicode")
        assert single in text
        assert ddp in text
    text = ET.tostring(svgs(shown.html, "resources")[0], encoding="unicode")
    assert ddp in text
    assert single not in text


def test_two_files_are_compared(report: Callable[..., Report]) -> None:
    """The table has the layouts in both files, the ratio, and whether the intervals overlap."""

    def speed(median: float, low: float, high: float) -> dict[str, object]:
        return {"throughput_samples_per_second": Interval(median, low, high, trials=5)}

    other_commit = {**timed("ddp", EQUAL).provenance, "commit": "bbbb"}
    old = [
        timed("single", EQUAL, 5, **speed(100, 90, 110)),
        timed("ddp", EQUAL, 7, **speed(100, 99, 101)),
        timed("zero1", EQUAL, 7, **speed(100, 99, 101)),
        timed("fsdp", EQUAL, 7, **speed(100, 99, 101)),
    ]
    new = [
        timed("single", EQUAL, 5, provenance=other_commit, **speed(105, 95, 115)),
        timed("ddp", EQUAL, 7, provenance=other_commit, loss=[3.0] * 20, **speed(200, 199, 201)),
        timed("zero1", DIFFERENT, 7, provenance=other_commit, **speed(200, 199, 201)),
    ]
    shown = report(old, new)
    rows = {row[0]: row for row in table_rows(shown.markdown)[2:]}
    # fsdp is in one file only, and zero1 is equal in one file only
    assert set(rows) == {"mine · single · 2 ranks", "mine · ddp · 2 ranks"}
    assert rows["mine · single · 2 ranks"][3:] == ["1.050", "overlap", "0.0e+00"]
    assert rows["mine · ddp · 2 ranks"][3:5] == ["2.000", "apart: faster"]
    assert rows["mine · ddp · 2 ranks"][5] == "2.9e+01"  # the last losses are 3.0 and 0.1
    for text in shown:
        assert "1.json has bbbb" in text
    assert len(re.findall('<figure id="beside">.*?<svg', shown.html, re.DOTALL)) == 1
    slower = report(new[:2], old[:2])
    assert table_rows(slower.markdown)[3][3:5] == ["0.500", "apart: slower"]


@pytest.mark.parametrize("parity", [DIFFERENT, NOT_VERIFIED])
@pytest.mark.parametrize("others", [[timed("single", EQUAL, 5)], []])
def test_unverified_layout_shows_no_number(report: Callable[..., Report], parity: Parity, others: list[Record]) -> None:
    """No output shows the speed of a layout that is not verified as equal, even if its Record contains numbers."""
    for text in report([*others, timed("ddp", parity, 7)]):
        assert not re.search(r"7[,.]?7[,.]?7[,.]?7", text)
        assert "1.40" not in text
        assert "ddp" in text


def test_no_ratio_to_an_unverified_single(report: Callable[..., Report]) -> None:
    """The ratio would reveal the speed of `single`, because the speed of the other layout is shown."""
    shown = report([timed("single", NOT_VERIFIED, 5), timed("ddp", EQUAL, 7)])
    for text in shown:
        assert "777,777" in text
        assert not re.search(r"5[,.]?5[,.]?5[,.]?5", text)
        assert "1.40" not in text


def test_report_explains_why_numbers_are_missing(report_without_charts: Callable[..., Report]) -> None:
    """A layout without numbers is marked as different or not verified, with the reason."""
    shown = report_without_charts(
        [timed("single", EQUAL, 5), timed("ddp", DIFFERENT, 7), timed("dataparallel", NOT_VERIFIED, 3)]
    )
    for text in (re.sub(r"\\", "", shown.markdown), shown.html, re.sub(r"\s+", " ", shown.terminal)):
        assert "DIFFERENT" in text
        assert "not verified here: needs 2 CUDA devices" in text
        assert "update 3, tensor layers.0.weight" in text
        assert "sum where the mean is meant" in text


def test_records_of_verify_show_differences(report: Callable[..., Report]) -> None:
    """The Records of `verify` have no speed. Their table shows the differences and the tolerance."""
    no_measurements = {
        "throughput_samples_per_second": None,
        "step_seconds": None,
        "epoch_seconds": None,
        "metrics": {},
    }
    within_tolerance = dataclasses.replace(EQUAL, max_relative_difference=3e-14)
    shown = report([timed("ddp", within_tolerance, **no_measurements), timed("fsdp", DIFFERENT, **no_measurements)])
    for text in shown:
        assert "3.0e-14" in text
        assert "5.0e-01" in text
        assert "1e-10" in text


def test_several_files_make_one_report(report: Callable[..., Report]) -> None:
    """Every Record of every file is shown, and each workload is compared with its own `single`."""
    shown = report(
        [timed("single", EQUAL, 5), timed("ddp", EQUAL, 7)],
        [timed("single", EQUAL, 3, workload="another"), timed("fsdp", EQUAL, 9, workload="another")],
    )
    for text in shown:
        for word in ("mine", "another", "ddp", "fsdp", "555,555", "777,777", "333,333", "999,999"):
            assert word in text
        assert "3.00" in text  # 999999 / 333333: relative to the single of its own workload
        assert "1.80" not in text  # 999999 / 555555: relative to the single of the other workload


EVIL = "<script>alert(1)</script>"
EVIL_LAYOUT = "ddp|--><img src=x onerror=alert(2)>|$x$"
EVIL_CAUSE = "|`</td>`| <b onclick=alert(3)>bold</b> ]]> {{ 7 * 7 }} [bold red]x[/] [link](javascript:alert(4)) & &lt;"


@pytest.fixture
def hostile(report: Callable[..., Report]) -> Report:
    """A report of Records from an untrusted file, with markup in every text field."""
    different = dataclasses.replace(DIFFERENT, first_divergence=EVIL_CAUSE, cause=EVIL_CAUSE, checks=[EVIL_CAUSE])
    not_verified = dataclasses.replace(NOT_VERIFIED, reason=EVIL_CAUSE, checks=[EVIL])
    provenance = {EVIL: EVIL, "torch": EVIL, "method": EVIL_CAUSE, "cores": EVIL, "global_batch": EVIL}
    everywhere = {"workload": EVIL, "device": "cpu", "provenance": provenance, "metrics": {EVIL_CAUSE: 0.5}}
    return report(
        [
            timed("single", EQUAL, **everywhere),
            timed(EVIL_LAYOUT, different, **everywhere),
            timed(EVIL, not_verified, **everywhere),
            timed("fsdp" + EVIL_CAUSE, EQUAL, **everywhere),
        ]
    )


def test_html_is_inert(hostile: Report) -> None:
    """A Record from an untrusted file runs no script and adds no element to the page."""
    page = Page(hostile.html)
    names = {name for name, _ in page.tags}
    assert not names & {"script", "img", "iframe", "object", "embed", "form", "base", "a"}
    for name, attributes in page.tags:
        assert not [key for key in attributes if key.startswith("on")], name
    assert page.text.count(EVIL) >= 4
    assert EVIL_LAYOUT in page.text
    assert EVIL_CAUSE in page.text
    assert "alert" not in page.comments
    assert "{{ 7 * 7 }}" in page.text


def test_html_has_one_cell_for_each_column(hostile: Report) -> None:
    """Markup in a Record does not add or move cells of its row."""
    table = re.search(r'<table class="main">.*?</table>', hostile.html, re.DOTALL)
    assert table is not None
    columns = table[0].count("<th>")
    assert table[0].count("<td") == 3 * columns
    assert table[0].count("<tr>") == 4


def test_markdown_is_inert(hostile: Report) -> None:
    """On GitHub, an unescaped pipe would move the cells, and an unescaped tag would be HTML."""
    assert "<" not in hostile.markdown
    rows = table_rows(hostile.markdown)
    assert len(rows) == 5
    assert {len(row) for row in rows} == {len(rows[0])}
    assert not re.search(r"(?<!\\)\]\(", hostile.markdown)
    assert not re.search(r"(?<!\\)`", hostile.markdown)


def test_the_terminal_shows_markup_as_text(hostile: Report) -> None:
    """Unescaped, rich would interpret [bold red] as a style and remove it."""
    text = re.sub(r"\s+", "", hostile.terminal)
    assert "[boldred]x[/]" in text
    assert EVIL in text


@pytest.mark.parametrize("text", ["two\nlines", "two\r\nlines", "two\n\n# lines", "a\n| b | c |"])
def test_line_breaks_stay_in_their_cell(report_without_charts: Callable[..., Report], text: str) -> None:
    """Unescaped, a line break in a name would end the Markdown table, and the rest would be read as markup."""
    not_verified = dataclasses.replace(NOT_VERIFIED, reason=text)
    shown = report_without_charts([timed("single", EQUAL, 5), timed(text, EQUAL, 3), timed("ddp", not_verified, 7)])
    rows = table_rows(shown.markdown)
    assert len(rows) == 4
    assert {len(row) for row in rows} == {len(rows[0])}
    assert "lines" in rows[3][0] or "b" in rows[3][0]
    [footnote] = [line for line in shown.markdown.splitlines() if line.startswith("ddp: not verified here: ")]
    assert "lines" in footnote or "c" in footnote


def test_layouts_that_did_not_run_are_listed_below_the_table(report_without_charts: Callable[..., Report]) -> None:
    """A table full of empty cells hides the layouts that ran. Layouts with the same reason share a line."""
    reason = "workload mine has no tensor_plan, which says how matrices are split, and so on for two lines more"
    not_verified = dataclasses.replace(NOT_VERIFIED, reason=reason)
    for timings in ({}, {"throughput_samples_per_second": None, "step_seconds": None}):
        shown = report_without_charts(
            [
                timed("single", EQUAL, 5, **timings),
                timed("tensor", not_verified, 7, **timings),
                timed("dataparallel", NOT_VERIFIED, 7, **timings),
                timed("fsdp:tensor=2", not_verified, 7, **timings),
            ]
        )
        assert [row[0] for row in table_rows(shown.markdown)[2:]] == ["single"]
        for text in shown:
            flat = re.sub(r"\s+", " ", text.replace("\\", ""))
            assert flat.count(f"tensor, fsdp:tensor=2: not verified here: {reason}") == 1
            assert flat.count("dataparallel: not verified here: ") == 1


@pytest.mark.parametrize(
    ("values", "cause"),
    [
        (
            {"resources": Resources(0.5, [1.0], [50.0], [1], others_percent=[130.0])},
            "other programs used 1.3 of 2 cores",
        ),
        ({"resources": None}, "its 2 threads wait for each other"),
        ({"resources": None, "device": "cuda"}, "does not fit in the CPU cache"),
    ],
)
def test_impossible_speed_up_is_marked_with_its_likely_cause(
    report_without_charts: Callable[..., Report], values: dict[str, Any], cause: str
) -> None:
    """The numbers are from a real run. On a busy machine, `single` ran at 8 samples/s and ddp on 2 ranks at 55."""
    provenance = {**timed("single", EQUAL).provenance, "threads_per_rank": 2}
    single = timed("single", EQUAL, 5, provenance=provenance, **values)
    device = {"device": single.device, "provenance": provenance}
    impossible = timed("ddp", EQUAL, 7, ratio_to_single=Interval(7.12, 4.49, 11.24, trials=5), **device)
    for text in report_without_charts([single, impossible]):
        flat = re.sub(r"\s+", " ", text)
        assert "7.12 (4.49 to 11.24) ¹" in flat
        assert re.search(f"¹ speed-up above 2 with 2 ranks: .* {cause}", flat)
    for layout, ratio in (
        ("ddp", Interval(2.4, 1.9, 2.9, trials=5)),
        ("ddp:precision=bf16", Interval(4, 3, 5, trials=5)),
    ):
        possible = timed(layout, EQUAL, 7, ratio_to_single=ratio, **device)
        assert all("speed-up above" not in text for text in report_without_charts([single, possible]))


def test_impossible_efficiency_is_marked(report_without_charts: Callable[..., Report]) -> None:
    """An efficiency is marked if even the low end of its interval is above 1."""
    on_1_rank = timed("ddp", EQUAL, 5, world_size=1)
    for text in report_without_charts([on_1_rank, scaled("ddp", 2, "strong", 2.5)]):
        assert "2.50 (1.25 to 5.00) ¹" in re.sub(r"\s+", " ", text)
        assert "efficiency above 1" in re.sub(r"\s+", " ", text)
    assert all(
        "efficiency above" not in text for text in report_without_charts([on_1_rank, scaled("ddp", 2, "strong", 1.5)])
    )


def test_load_of_other_programs_is_reported_if_it_matters(report_without_charts: Callable[..., Report]) -> None:
    """A small, missing or invalid load of other programs is not reported."""

    def records_with_load(cores: object) -> list[Record]:
        load = {"before": 3.14, "others_cores": cores}
        return [timed("single", EQUAL, 5, resources=None, provenance={**timed("a", EQUAL).provenance, "load": load})]

    for text in report_without_charts(records_with_load(1.3)):
        assert "1.3 of 2 cores while single ran" in re.sub(r"\s+", " ", text)
    for cores in (0.1, None, "many"):
        assert all("Other programs" not in text for text in report_without_charts(records_with_load(cores)))


def test_interrupted_bench_reports_missing_trials(report_without_charts: Callable[..., Report]) -> None:
    """The report names each verified layout that has fewer trials than were requested."""
    provenance = {**timed("single", EQUAL).provenance, "trials_asked": 5}
    two_trials = Interval(5.0, 4.0, 6.0, trials=2)
    no_measurements = {"throughput_samples_per_second": None, "step_seconds": None}
    records = [
        timed("single", EQUAL, 5, provenance=provenance),
        timed("ddp", EQUAL, 5, provenance=provenance, throughput_samples_per_second=two_trials),
        timed("fsdp", EQUAL, 5, provenance=provenance, **no_measurements),
        timed("tensor", NOT_VERIFIED, 5, provenance=provenance, **no_measurements),
    ]
    for text in report_without_charts(records):
        flat = re.sub(r"\s+", " ", text)
        assert "ddp has 2 of 5" in flat
        assert "fsdp has 0 of 5" in flat
        assert "tensor has" not in flat
    assert all("interrupted" not in text for text in report_without_charts(records[:1]))


def test_page_begins_with_the_fastest_layout(report: Callable[..., Report]) -> None:
    """The page begins with the fastest layout and whether all layouts are equal. The main table follows."""
    records = [timed("single", EQUAL, 5), timed("ddp", EQUAL, 7), timed("dataparallel", NOT_VERIFIED, 3)]
    page = report(records).html
    fastest = "777,777 samples/s, 1.40 times as fast as single"
    assert "Both layouts that ran are equal" in page
    assert page.index(fastest) < page.index("<table") < page.index("<svg") < page.index('<table class="more">')
    wide_interval = Interval(777_776.0, 777_770.0, 777_779.0, trials=5)
    nearly_as_fast = timed("zero1", EQUAL, 7, throughput_samples_per_second=wide_interval)
    assert "zero1 may be as fast" in report([*records, nearly_as_fast]).html
    page = report([*records, timed("fsdp", DIFFERENT, 9)]).html
    assert "fsdp differs from one device; 2 of 3 layouts are equal" in page
    unsupported = Parity("refused", reason="no plan")
    assert "Both layouts that ran are equal" in report([*records, timed("tensor", unsupported, 9)]).html
    two_launches = [*records, timed("ddp", EQUAL, 5, world_size=4)]
    assert "Both layouts that ran are equal" in report(two_launches).html
    no_measurements = {"throughput_samples_per_second": None, "step_seconds": None}
    assert "No layout was verified here." in report([timed("tensor", NOT_VERIFIED, 7, **no_measurements)]).html


@pytest.mark.integration
@pytest.mark.skipif(shutil.which("chromium") is None, reason="how wide the page is was not verified: needs chromium")
@pytest.mark.parametrize("width", [420, 1100])
def test_page_needs_no_horizontal_scrolling(report: Callable[..., Report], tmp_path: Path, width: int) -> None:
    """The page fits the width of a phone and of half a screen, with very long names and reasons."""
    long_reason = dataclasses.replace(NOT_VERIFIED, reason="this workload cannot be laid out like that because " * 5)
    ratio = {"ratio_to_single": Interval(7.12, 4.49, 11.24, trials=5)}
    shown = report(
        [
            timed("single", EQUAL, 5),
            timed(
                "fsdp:replicate=2,context=2,accumulate=4,precision=bf16,recompute,reshard_after_forward=false", EQUAL
            ),
            timed("pipeline:tensor=2,schedule=interleaved,microbatches=16", EQUAL, 7, **ratio),
            timed("tensor:" + "x" * 120, long_reason, 7),
        ],
        [timed("single", EQUAL, 3), timed("ddp", EQUAL, 7)],
    ).html
    probe = """<iframe id=f width=%d height=900 style="border:0" srcdoc="%s"></iframe><pre id=found></pre><script>
    f.onload = () => { const inside = f.contentDocument; const wide = [inside.documentElement];
      for (const one of inside.body.querySelectorAll("*")) wide.push(one);
      found.textContent = wide.filter(one => one.scrollWidth > one.clientWidth && one.clientWidth > 0
        && !one.closest("svg") && getComputedStyle(one).display != "inline").map(one => one.tagName
        + " " + one.className + " " + one.scrollWidth + ">" + one.clientWidth).join("; ") || "fits"; }</script>"""
    text = re.sub(r"<meta http-equiv[^>]*>", "", shown)
    (tmp_path / "probe.html").write_text(probe % (width, html.escape(text)), encoding="utf-8")
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'chromium'}"]
    command += ["--virtual-time-budget=5000", "--window-size=1300,1000", "--dump-dom", str(tmp_path / "probe.html")]
    process = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    probe_result = re.search(r'<pre id="found">(.*?)</pre>', process.stdout, re.DOTALL)
    assert probe_result is not None, process.stderr
    assert probe_result[1] == "fits"


def test_the_page_loads_nothing(hostile: Report) -> None:
    """The page can be mailed and opened without a network, because it refers to no other file or address."""
    page = Page(hostile.html)
    loading = {"src", "href", "xlink:href", "srcset", "action", "data", "poster", "background", "ping"}
    for name, attributes in page.tags:
        assert name not in {"link", "script", "iframe", "object", "embed"}
        for key in loading & set(attributes):
            assert attributes[key].startswith(("#", "data:")), (name, key, attributes[key])
        assert "refresh" not in attributes.get("http-equiv", "").lower()
    for address in re.findall(r"url\(\s*['\"]?([^)]*)", hostile.html):
        assert address.startswith(("#", "data:")), address
    assert "@import" not in hostile.html


def test_loss_chart_has_one_line_for_each_layout(report: Callable[..., Report]) -> None:
    """Every curve is in the chart with its label, even if the curves are identical."""
    layouts = ["single", "ddp", "ddp:accumulate=2", "zero1", "fsdp"]
    shown = report([timed(layout, EQUAL) for layout in layouts])
    [svg] = svgs(shown.html)
    lines = curves(svg)
    assert len(lines) == len(layouts)
    assert len({line.get("style", "") for line in lines}) == len(layouts)
    for line in lines:
        assert len(re.findall("[ML]", line.get("d", ""))) == 20
    labels = [text.text for text in svg.iter(f"{SVG}text")]
    for layout in layouts:
        assert labels.count(layout) == 1


def test_small_differences_have_plain_labels(report: Callable[..., Report]) -> None:
    """An axis shorter than a decade has labels between the powers of ten, without math markup."""
    losses = [2.0 / (i + 1) for i in range(20)]
    near = [loss * (1 + (3 + i % 5) * 1e-8) for i, loss in enumerate(losses)]
    [svg] = svgs(report([timed("single", EQUAL, loss=losses), timed("ddp", EQUAL, loss=near)]).html)
    labels = [text.text or "" for text in svg.iter(f"{SVG}text")]
    assert any(label.replace("\N{MINUS SIGN}", "-").endswith("e-08") for label in labels)
    assert not [label for label in labels if "$" in label or "mathdefault" in label]


def test_single_trial_has_no_interval(report: Callable[..., Report]) -> None:
    """An interval from a value to the same value would look like an exact measurement."""
    one_trial = Interval(1_307.0, 1_307.0, 1_307.0, trials=1)
    page = report([timed("single", EQUAL, throughput_samples_per_second=one_trial)]).html
    assert "1,307" in page
    assert "1,307 to 1,307" not in re.sub(r"\s+", " ", page)


def test_loss_chart_is_well_formed_for_any_layout_name(hostile: Report) -> None:
    """A name with markup or dollar signs is drawn unchanged."""
    [svg] = svgs(hostile.html)
    assert len(curves(svg)) == 4
    labels = [text.text for text in svg.iter(f"{SVG}text")]
    assert EVIL in labels
    assert EVIL_LAYOUT[:29] + "…" in labels  # longer names are cut, to leave room for the chart


def test_every_workload_has_its_own_loss_chart(report: Callable[..., Report]) -> None:
    """The losses of different workloads are not comparable."""
    shown = report(
        [timed("single", EQUAL), timed("ddp", EQUAL)],
        [timed("single", EQUAL, workload="another"), timed("ddp", EQUAL, workload="another")],
    )
    drawings = svgs(shown.html)
    assert [len(curves(svg)) for svg in drawings] == [2, 2]


def test_records_with_nan_or_missing_values_can_be_shown(report: Callable[..., Report]) -> None:
    """NaN and Infinity are null in the file. A run with such losses is one that users want to look at."""
    infinite_tolerance = dataclasses.replace(DIFFERENT, max_relative_difference=0.25, tolerance=math.inf)
    infinite_difference = dataclasses.replace(DIFFERENT, max_relative_difference=math.inf, tolerance=1e-10)
    shown = report(
        [
            timed("single", EQUAL, 5, metrics={"top1": math.nan, "eval_loss": math.nan}),
            timed("ddp", infinite_tolerance, 7, loss=[1.0, math.nan, math.inf]),
            timed("fsdp", infinite_difference, 3, loss=[math.nan] * 5),
            timed("zero1", EQUAL, 9, loss=[], epoch_seconds=None, metrics={}, provenance={}),
        ]
    )
    for text in shown:
        assert "555,555" in text
        assert "999,999" in text
        assert "zero1" in text


def test_infinite_differences_can_be_shown(report: Callable[..., Report]) -> None:
    """The table of `verify` can show an infinite difference and an infinite tolerance."""
    no_measurements = {"throughput_samples_per_second": None, "step_seconds": None}
    infinite_tolerance = dataclasses.replace(DIFFERENT, max_relative_difference=0.25, tolerance=math.inf)
    infinite_difference = dataclasses.replace(DIFFERENT, max_relative_difference=math.inf, tolerance=1e-10)
    for text in report(
        [timed("ddp", infinite_tolerance, **no_measurements), timed("fsdp", infinite_difference, **no_measurements)]
    ):
        assert "ddp" in text
        assert "fsdp" in text


def test_report_without_output_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The report is printed to the terminal only, and the Record file is not changed."""
    path = tmp_path / "records.json"
    write_records([timed("single", EQUAL, 5)], path)
    before = path.read_bytes()
    handler = signal.getsignal(signal.SIGTERM)
    try:
        assert main(["report", str(path)]) == 0
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert "555,555" in capsys.readouterr().out
    assert path.read_bytes() == before
    assert read_records(path) == [timed("single", EQUAL, 5)]
    assert list(tmp_path.iterdir()) == [path]


ODD: list[dict[str, Any]] = [
    {"throughput_samples_per_second": Interval(0.0, 0.0, 0.0, trials=1)},
    {"throughput_samples_per_second": Interval(5.0, math.nan, math.inf, trials=1)},
    {"loss": [1.0] + [math.nan] * 19},
    {"loss": [0.0] * 20},
    {"scaling": Scaling("weak", Interval(0.5, 0.7, 0.1, trials=1))},
    {"resources": Resources(0.5, [1.0, 2.0], [1.0], [1])},
    {"breakdown_seconds": Breakdown(0.0, 0.0, 0.0, 0.0, 0.0)},
    {"collectives": [], "peak_memory_bytes": 0, "breakdown_seconds": None},
    {"layout": "ddp \ud800", "workload": "\ud800"},
]


@pytest.mark.parametrize("values", ODD, ids=lambda values: next(iter(values)))
def test_odd_records_can_be_shown(report: Callable[..., Report], values: dict[str, Any]) -> None:
    """A report can be made of a file with unusual values."""
    shown = report([dataclasses.replace(timed("ddp", EQUAL, 7), **values)])
    assert "ddp" in shown.markdown
    svgs(shown.html)


def test_odd_records_can_be_compared_with_others(report: Callable[..., Report]) -> None:
    """Two files that both contain all odd Records and two usual ones can be compared."""
    odd = [
        dataclasses.replace(timed(f"ddp:accumulate={number + 2}", EQUAL, 7), **values)
        for number, values in enumerate(ODD)
    ]
    usual = [timed("single", EQUAL, 5), timed("ddp", EQUAL, 7)]
    shown = report([*usual, *odd], [*odd, *usual])
    assert all(record.layout in shown.markdown for record in odd[:-1])
    svgs(shown.html)


def test_difference_from_a_nan_loss_is_unknown(report_without_charts: Callable[..., Report]) -> None:
    """`max` of numbers and a NaN depends on their order, so the report must not use its result."""
    finite_loss, nan_loss = timed("ddp", EQUAL, 7, loss=[1.0, 2.0]), timed("ddp", EQUAL, 7, loss=[1.0, math.nan])
    assert table_rows(report_without_charts([finite_loss], [nan_loss]).markdown)[2][5] == "?"


def test_records_with_different_settings_are_not_compared(report_without_charts: Callable[..., Report]) -> None:
    """A wider model is slower, but this says nothing about the layout."""
    wide_provenance = {**timed("ddp", EQUAL).provenance, "settings": {"width": 32}}
    usual, again, wide = (
        timed("ddp", EQUAL, 7),
        timed("ddp", EQUAL, 5),
        timed("ddp", EQUAL, 5, provenance=wide_provenance),
    )
    assert "95% intervals" in report_without_charts([usual], [again]).markdown  # a column of the comparison
    assert "95% intervals" not in report_without_charts([usual], [wide]).markdown


def test_audit_page_shows_code_without_indentation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Deeply nested lines fit next to their findings. Files in the current folder have relative names."""
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "train.py"
    script.write_text("def main():\n    for x in data:\n        loss = f(x)\n        loss.backward()\n" * 3)
    finding = Finding(
        "FAIL", "gradient.scale", f"{script}:7", "too large", other_lines=(f"{script}:8", "/elsewhere/b.py:1")
    )
    page = audit_page(Audit(("train.py",), 2, 12, 4.0, (finding,), (), ()))
    assert '<span class="named">   7          loss = f(x)</span>' in page
    assert "<span>   3          loss = f(x)</span>" in page
    assert "<h2>train.py</h2>" in page
    assert "look at train.py:7, train.py:8, /elsewhere/b.py:1<" in page
    script.write_text("        if x:\n            loss.backward()\n")
    page = audit_page(Audit(("train.py",), 2, 12, 4.0, (dataclasses.replace(finding, location=f"{script}:2"),), (), ()))
    assert '<span class="named">   2      loss.backward()</span>' in page


def test_audit_page_shows_the_line_after_a_form_feed(tmp_path: Path) -> None:
    """Python counts no line for a form feed, which some editors put between the parts of a file."""
    script = tmp_path / "train.py"
    script.write_text("import torch\n\f\nloss.backward()\n")
    page = audit_page(Audit(("train.py",), 2, 12, 4.0, (Finding("FAIL", "a.b", f"{script}:3", "large"),), (), ()))
    assert '<span class="named">   3  loss.backward()</span>' in page
