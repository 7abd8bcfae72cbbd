"""How many silent bugs the relations of audit find without any rule, the rules without relations, and both.

Run: python benchmarks/relations_alone.py [--json F] [--reports DIR] [--docs] [SET ...] [--scripts NAME ...]

A rule knows one mistake. A relation, such as "N ranks with the same batches train as one rank does", holds for every
correct training, so it also finds mistakes that nobody has listed. Each script runs as it is and corrected:

    rules      everyrank audit --no-compare
    relations  the comparisons alone: no rule runs
    both       a FAIL or WARN of one of them

SET is corpus (the scripts of silent_bugs/), blind1 to blind7, or reports: a folder of NAME.py and NAME_ok.py,
given by --reports, whose scripts are not in this repository. Results are added to F after each script, so a run that
was ended goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from silent_bugs import (
    BLIND_SETS,
    CORPUS_FOLDER,
    MISTAKE_MARK,
    alarms_by_rule,
    copy_with_mistakes,
    provenance,
    run_audit,
)

from everyrank.audit.finding import Findings
from everyrank.relations import judge_script
from everyrank.rerun import ScriptHost

RECORD = Path(__file__).parent / "records" / "relations-alone-cpu.json"
DOCS = Path(__file__).parents[1] / "docs"
UNCORRECTED = {"v01_noaug", "v02_shuffle", "v19_softplus", "v19b_two_or_more"}  # reports with a mistake
BEGIN, END = "<!-- generated: python benchmarks/relations_alone.py --docs -->", "<!-- end of relations -->"
TITLES = {  # in English and Chinese
    "corpus": ("public bugs, used while the rules were written", "公开的错误，写规则时参考过"),
    "blind1": ("blind set 1", "盲测集 1"),
    "blind2": ("blind set 2", "盲测集 2"),
    "blind3": ("blind set 3", "盲测集 3"),
    **{f"blind{number}": (f"blind set {number}", f"盲测集 {number}") for number in range(4, 8)},
    "reports": ("more public reports", "其他公开报告"),
}
HEADS = (
    "| scripts | mistakes | rules alone | relations alone | both | false alarms of rules | of relations |",
    "| 脚本 | 错误 | 只用规则 | 只用关系 | 合起来 | 规则的误报 | 关系的误报 |",
)
OF = ("of", "/")


def pairs(folder: Path) -> list[tuple[Path, list[str], list[str] | None]]:
    """(script, its command, the corrected command) of each script; a correct script has no correction."""
    found: list[tuple[Path, list[str], list[str] | None]] = []
    for script in sorted(folder.glob("*.py")):
        if script.stem.endswith(("_ok", "_right")):
            continue
        text = script.read_text()
        corrected = next(
            (c for end in ("_ok", "_right") if (c := script.with_name(f"{script.stem}{end}.py")).exists()), None
        )
        if corrected is not None:
            found.append((script, [str(script)], [str(corrected)]))
        elif MISTAKE_MARK in text and "Kind: parallelize" not in text:
            found.append((script, [str(script)], [str(script), "--right"]))
        elif MISTAKE_MARK not in text and "Kind:" not in text:
            found.append((script, [str(script)], None))
    return [*found, *((script, [str(script)], None) for script in sorted((folder / "correct").glob("*.py")))]


def by_relations(host: ScriptHost, script: Path, words: list[str]) -> dict[str, Any]:
    """What the relations find, in the form of the JSON of an audit."""
    text, findings, begin = script.read_text(), Findings(), time.monotonic()
    if "spawn(" in text:
        findings.add_unchecked("the script starts its ranks itself")
    else:
        ranks = re.search(r"nproc-per-node (\d)", text) or re.search(r"needs (\d) ranks", text)
        default = 1 if f"python {script.name}" in text else 2
        judge_script(host, words, int(ranks[1]) if ranks else default, findings)
    seconds = round(time.monotonic() - begin, 1)
    return {"findings": [each.as_json() for each in findings], "not_checked": findings.unchecked, "seconds": seconds}


def row(script: Path, wrong: dict[str, Any], right: dict[str, Any] | None) -> dict[str, Any]:
    """One script by one way: which rules or relations found it, whether the marked line is shown, false alarms."""
    lines = [number for number, text in enumerate(script.read_text().splitlines(), 1) if MISTAKE_MARK in text]
    if right is None:
        has_mistake = script.stem in UNCORRECTED
        return {
            "found": list(alarms_by_rule(wrong)) if has_mistake else [],
            "line": None,
            "false": [] if has_mistake else list(alarms_by_rule(wrong)),
            "why": wrong.get("not_checked", []),
            "seconds": wrong["seconds"],
        }
    false = alarms_by_rule(right)
    found = {rule: finding for rule, finding in alarms_by_rule(wrong).items() if rule not in false}
    places = [place for finding in found.values() for place in finding["lines"]]
    has_line = any(place.endswith(f"{script.name}:{line}") for place in places for line in lines)
    why = [] if found else [*wrong.get("not_checked", []), *wrong.get("error", [])]
    return {
        "found": list(found),
        "line": has_line if lines else None,
        "false": list(false),
        "why": why[:4],
        "seconds": wrong["seconds"],
    }


def run(
    name: str, folder: Path, path: Path, record: dict[str, Any], ways: list[str], scripts: Collection[str] = ()
) -> None:
    """Run the scripts of a set that the Record does not have yet: all, or those with these names."""
    rows = record.setdefault("rows", {}).setdefault(name, {})
    with ScriptHost([str(next(folder.glob("*.py")))], timeout_seconds=60.0) as host:
        for script, words, corrected in pairs(folder):
            if scripts and script.stem not in scripts:
                continue
            each = rows.setdefault(script.stem, {"has_mistake": corrected is not None or script.stem in UNCORRECTED})
            for way in ways:
                if way in each:
                    continue
                results = [
                    None
                    if c is None
                    else by_relations(host, script, c)
                    if way == "relations"
                    else run_audit(Path(c[0]), *c[1:], audit_flags=("--no-compare",))
                    for c in (words, corrected)
                ]
                assert results[0] is not None
                each[way] = row(script, results[0], results[1])
                shown = each[way]
                print(f"{name} {script.stem} {way}: {shown}", flush=True)
                merge(path, record, name, script.stem)


def merge(path: Path, record: dict[str, Any], name: str, stem: str) -> None:
    """Add one row to the file, which another set may be written to at the same time."""
    stored = (
        json.loads(path.read_text())
        if path.exists()
        else {"command": "python benchmarks/relations_alone.py", "rows": {}}
    )
    stored["rows"].setdefault(name, {})[stem] = record["rows"][name][stem]
    stored["provenance"] = provenance()
    partial = path.with_suffix(f".{name}")
    partial.write_text(json.dumps(stored, indent=1) + "\n")
    partial.replace(path)


def table(record: dict[str, Any], language: int) -> str:
    """Mistakes found, with the line, and false alarms on correct programs, of each set; "-" if it was not run."""
    lines = [BEGIN, "", HEADS[language], "| --- | ---: | ---: | ---: | ---: | ---: | ---: |"]
    for name, titles in TITLES.items():
        rows = list(record["rows"].get(name, {}).values())
        mistakes = [each for each in rows if each["has_mistake"]]
        cells = [found_by(mistakes, ways) for ways in (("rules",), ("relations",), ("rules", "relations"))]
        cells += [false_alarms(rows, way, OF[language]) for way in ("rules", "relations")]
        if rows:
            lines.append(f"| {titles[language]} | {len(mistakes)} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", END])


def found_by(mistakes: list[dict[str, Any]], ways: tuple[str, ...]) -> str:
    """Return `21 (17)`: mistakes that one of these ways has found, and those with their line, if lines are marked."""
    if not all(way in each for each in mistakes for way in ways):
        return "-"
    found, lines = (sum(any(each[way][what] for way in ways) for each in mistakes) for what in ("found", "line"))
    has_lines = any(each[way]["line"] is not None for each in mistakes for way in ways)
    return f"{found} ({lines})" if has_lines else f"{found}"


def false_alarms(rows: list[dict[str, Any]], way: str, of: str) -> str:
    """`0 of 44`: correct programs with a false alarm."""
    known = [each[way] for each in rows if way in each]
    return f"{sum(bool(each['false']) for each in known)} {of} {len(known)}" if known else "-"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", nargs="*", metavar="SET")
    parser.add_argument("--json", type=Path, default=RECORD)
    parser.add_argument("--reports", type=Path)
    parser.add_argument("--only", choices=("rules", "relations"))
    parser.add_argument("--scripts", nargs="+", default=(), metavar="NAME")
    parser.add_argument("--docs", action="store_true")
    args = parser.parse_args()
    if args.docs:
        for language, page in enumerate((DOCS / "silent-bugs.md", DOCS / "zh" / "silent-bugs.md")):
            before, _, rest = page.read_text().partition(BEGIN)
            page.write_text(f"{before}{table(json.loads(args.json.read_text()), language)}{rest.partition(END)[2]}")
        return
    ways = [args.only] if args.only else ["rules", "relations"]
    record: dict[str, Any] = json.loads(args.json.read_text()) if args.json.exists() else {}
    for name in args.sets or [name for name in TITLES if name != "reports" or args.reports]:
        with tempfile.TemporaryDirectory() as scratch:
            if name == "corpus":
                folder = CORPUS_FOLDER
            elif name == "reports":
                folder = args.reports
            else:
                folder = copy_with_mistakes(BLIND_SETS[int(name.removeprefix("blind"))], Path(scratch))
            run(name, folder, args.json, record, ways, args.scripts)


if __name__ == "__main__":
    main()
