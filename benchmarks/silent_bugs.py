"""The corpus of silent bugs, each under the command that is for it: found or not, what was named, and false alarms.

Run: python benchmarks/silent_bugs.py [--blind [N]] [--json F] [--docs] [NAME ...]

`Kind: script`: the script of benchmarks/silent_bugs/ under `everyrank audit`, as it is and with --right, its smallest
correction; then the scripts of correct/. `Kind: parallelize`: its function under
`everyrank.testing.assert_same_gradients`, which is what `everyrank verify --layout FILE:MESH` looks at first; as it is
and with RIGHT=1.

found   audit: a FAIL or WARN that the corrected script does not get; verify: DIFFERENT
cause   what is named is what the file's own `Expected:` says: a rule of audit, or words that verify has to say, all
line    audit: the line that the file marks is among those that a finding shows, at most four; verify names tensors
first   it is the first of them: findings show the line to change most likely first
A FAIL or WARN for a corrected or a correct script, or DIFFERENT for a right function, is a false alarm.

--docs writes the tables of docs/silent-bugs.md from the Record. --blind N audits a blind set:
silent_bugs/blind_set/ and silent_bugs/blind_set_2/ with 15 mistakes each and 10 and 12 correct scripts,
silent_bugs/blind_set_3/ to blind_set_7/ with 24 and 20, by writers who had seen neither the rules nor the corpus.
Their first results are what counts; since then they have been looked at, like the others. There, NAME.py is the right
script, and wrong/NAME.patch puts the mistake into it. Sets 3 to 6 run under `everyrank audit --compare`, and their
Records have all findings; the cause is judged by a reader.
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "silent_bugs"
BLIND = {1: FOLDER / "blind_set", **{int(path.name[-1]): path for path in sorted(FOLDER.glob("blind_set_?"))}}
RECORD = Path(__file__).parent / "records" / "silent-bugs-cpu.json"
DOCS = Path(__file__).parents[1] / "docs" / "silent-bugs.md"
MISTAKE = "# <- the mistake"
BEGIN, END = "<!-- generated: python benchmarks/silent_bugs.py --docs -->", "<!-- end -->"


def field(text: str, name: str) -> str:
    """A line of the docstring: `Expected: gradient.scale`."""
    found = re.search(rf"^{name}:\s*(.*?)$", text, re.MULTILINE)
    return found[1] if found else ""


# --- the blind sets: a right script and a patch


def patched(text: str, patch: str) -> str:
    """The text after a unified diff. Raises ValueError where a line to keep or to remove is a different one."""
    lines, result, position = text.splitlines(), [], 0
    for line in patch.splitlines()[2:]:
        if hunk := re.match(r"@@ -(\d+)", line):
            result += lines[position : int(hunk[1]) - 1]
            position = int(hunk[1]) - 1
        elif line.startswith("+"):
            result.append(line[1:])
        else:
            if lines[position : position + 1] != [line[1:]]:
                raise ValueError(f"the patch does not fit: line {position + 1} is not {line[1:]!r}")
            result += [] if line.startswith("-") else [line[1:]]
            position += 1
    return "\n".join([*result, *lines[position:]]) + "\n"


def with_mistakes(blind_set: Path, folder: Path) -> Path:
    """A copy of a blind set in which each pair is two files: NAME.py with the mistake, and NAME_right.py."""
    copy = Path(shutil.copytree(blind_set, folder / blind_set.name))
    for patch in sorted((copy / "wrong").glob("*.patch")):
        script = copy / f"{patch.stem}.py"
        right = script.rename(copy / f"{patch.stem}_right.py").read_text()
        script.write_text(patched(right, patch.read_text()))
    return copy


# --- scripts, under audit


def audited(script: Path, *words: str, more: tuple[str, ...] = ()) -> dict[str, Any]:
    """What an audit of the script, with `more` options, comes to: its JSON, or the error that it ended with."""
    text = script.read_text()
    found = re.search(r"nproc-per-node (\d)", text) or re.search(r"needs (\d) ranks", text)
    default = "1" if f"python {script.name}" in text else "2"  # as its header starts it
    with tempfile.TemporaryDirectory() as folder:
        out, begin = Path(folder) / "found.json", time.monotonic()
        command = [sys.executable, "-m", "everyrank", "audit"]
        if "spawn(" not in text:  # else it starts its ranks itself
            command += ["--processes", found[1] if found else default]
        done = subprocess.run(
            [*command, *more, "--json", str(out), str(script), *words],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        result = json.loads(out.read_text()) if out.exists() else {"error": done.stderr.strip().splitlines()[-1:]}
    return {**result, "seconds": round(time.monotonic() - begin, 1)}


def alarms(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What is wrong, by rule."""
    return {f["rule"]: f for f in reversed(result.get("findings", [])) if f["level"] in ("FAIL", "WARN")}


def by_audit(script: Path, more: tuple[str, ...] = ()) -> dict[str, Any]:
    """One script of the corpus: wrong, then right. With `more` options, the row has the findings in full."""
    text = script.read_text()
    line = next(number for number, content in enumerate(text.splitlines(), 1) if MISTAKE in content)
    corrected = script.with_name(f"{script.stem}_right.py")
    wrong = audited(script, more=more)
    right = audited(corrected, more=more) if corrected.exists() else audited(script, "--right", more=more)
    false = alarms(right)
    found = {rule: finding for rule, finding in alarms(wrong).items() if rule not in false}
    lines = [[place.rpartition("/")[2] for place in finding["lines"]] for finding in found.values()]
    marked = f"{script.name}:{line}"
    expected = field(text, "Expected")
    shown = [expected] * (expected in found) + [rule for rule in found if rule != expected]
    return {
        "how": "audit",
        "found": bool(found),
        "cause": expected in found if expected else None,
        "line": any(marked in of_finding for of_finding in lines),
        "first": any(marked == of_finding[0] for of_finding in lines if of_finding),
        "shown": [len(of_finding) for of_finding in lines],
        "rules": shown,
        "named": found[shown[0]]["text"] if shown else "",
        "error": (wrong.get("error") or right.get("error") or [""])[0],
        "false_alarms": list(false),
        "seconds": wrong["seconds"],
        **(
            {
                "marked": line,
                "findings": details(found),
                "false_findings": details(false),
                "not_checked": wrong.get("not_checked", []),
            }
            if more
            else {}
        ),
    }


def details(found: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """The findings without the folder of the script."""
    return [
        {
            "level": finding["level"],
            "rule": rule,
            "lines": [place.rpartition("/")[2] for place in finding["lines"]],
            "place": finding["place"].rpartition("/")[2],
            "text": finding["text"],
        }
        for rule, finding in found.items()
    ]


# --- parallelize(model, mesh), under verify


def verified(file: Path, is_right: bool) -> tuple[str, float]:
    """What `assert_same_gradients` says of the function in this file, "" where it says nothing; and the seconds."""
    from everyrank.testing import assert_same_gradients

    begin, name = time.monotonic(), f"{file.stem}_{is_right}"
    os.environ["RIGHT"] = "1" if is_right else ""
    try:
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        module: Any = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # its functions travel to the ranks by value
        spec.loader.exec_module(module)
        mesh = {
            axis: int(size)
            for axis, _, size in (one.partition("=") for one in field(module.__doc__, "Mesh").split(","))
        }
        batch = module.inputs(0)
        takes_targets = len(inspect.signature(module.build().forward).parameters) == 2  # the loss is inside the model
        inputs = (batch if takes_targets else batch[0], batch[1])
        dim = 1 if "context" in mesh else None
        # parts that a function cuts by hand are no DTensor, and these files say nothing of how to put them together
        others = {"sequence_dim": dim, "allow_uncompared": ["*"]}
        assert_same_gradients(module.build, module.parallelize, inputs, module.terms, mesh, **others)
    except AssertionError as error:
        return str(error), time.monotonic() - begin
    finally:
        del os.environ["RIGHT"]
        sys.modules.pop(name, None)
    return "", time.monotonic() - begin


def by_verify(file: Path) -> dict[str, Any]:
    """One function of the corpus: wrong, then right."""
    (wrong, seconds), (right, _) = verified(file, is_right=False), verified(file, is_right=True)
    expected = field(file.read_text(), "Expected").split("; ")
    named = wrong.partition("DIFFERENT: ")[2]
    return {
        "how": "verify",
        "found": bool(named),
        "cause": bool(named) and all(words in named for words in expected),
        "line": None,
        "rules": [],
        "named": named,
        "error": "" if named or not wrong else wrong,
        "false_alarms": [right] if right else [],
        "seconds": round(seconds, 1),
    }


# --- all of them


def row_of(file: Path, more: tuple[str, ...] = ()) -> dict[str, Any]:
    """One bug: where it was reported, and what came of it."""
    text = file.read_text()
    result = by_verify(file) if field(text, "Kind") == "parallelize" else by_audit(file, more)
    missed = "" if result["found"] and result["cause"] in (True, None) else field(text, "Missed")
    return {"name": file.stem, "reported": field(text, "Reported"), **result, "missed": missed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--blind", type=int, nargs="?", const=1, choices=BLIND)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--docs", action="store_true")
    args = parser.parse_args()
    if args.docs:
        write_docs(json.loads(RECORD.read_text()))
        return
    with tempfile.TemporaryDirectory() as scratch:
        run(with_mistakes(BLIND[args.blind], Path(scratch)) if args.blind else FOLDER, args)


def run(folder: Path, args: argparse.Namespace) -> None:
    """Run the scripts of this folder, print what was found, and write the Record."""
    rows: list[dict[str, Any]] = []
    more = ("--compare",) if args.blind and args.blind >= 3 else ()
    for file in sorted(folder.glob("*.py")):
        if MISTAKE in file.read_text() and (not args.names or file.stem in args.names):
            rows.append(row_of(file, more))
            print(line_of(rows[-1]), flush=True)
    correct: dict[str, Any] = {}
    for script in sorted((folder / "correct").glob("*.py")) if not args.names else ():
        result = audited(script, more=more)
        found, error = list(alarms(result)), (result.get("error") or [""])[0]
        correct[script.stem] = {"alarms": found, "error": error, "seconds": result["seconds"]}
        if more:
            correct[script.stem]["findings"] = details(alarms(result))
        print(f"correct/{script.stem}: {', '.join(found) or error or 'nothing wrong found'}", flush=True)
    print(summary(rows, correct))
    if args.json:
        record = {"rows": rows, "correct": correct, "provenance": provenance()}
        if args.names and args.json.exists():  # some are run again: the others stay
            record = with_rows(json.loads(args.json.read_text()), rows)
        args.json.write_text(json.dumps(record, indent=1) + "\n")


def with_rows(record: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The Record with these rows in the place of those of the same name."""
    anew = {row["name"]: row for row in rows}
    return {**record, "rows": [anew.get(row["name"], row) for row in record["rows"]], "provenance": provenance()}


def provenance() -> dict[str, Any]:
    import torch

    return {"torch": torch.__version__, "cores": os.cpu_count(), "date": f"{datetime.now(UTC):%Y-%m-%d}"}


def line_of(row: dict[str, Any]) -> str:
    said = "not found"
    if row["found"]:
        said = ", ".join(row["rules"]) or row["named"]
        said += " (another cause)" * (row["cause"] is False) + " (another line)" * (row["line"] is False)
    alarm = f"  FALSE ALARM: {', '.join(row['false_alarms'])}" if row["false_alarms"] else ""
    return f"{row['name']}: {row['error'] or said}{alarm}"


def summary(rows: list[dict[str, Any]], correct: dict[str, Any]) -> str:
    """`51 of 58 found (88 %), 50 with the right cause, ...`."""
    false = [row["name"] for row in rows if row["false_alarms"]]
    false += [name for name, found in correct.items() if found["alarms"]]
    lines = [row["line"] for row in rows if row["line"] is not None and row["found"]]
    firsts, shown = sum(bool(row.get("first")) for row in rows), [n for row in rows for n in row.get("shown", ())]
    found, causes = sum(row["found"] for row in rows), sum(bool(row["cause"]) for row in rows)
    as_first = f", in {firsts} as the first of {sum(shown) / len(shown):.1f} lines that it shows" if shown else ""
    return (
        f"{found} of {len(rows)} found ({found / max(1, len(rows)):.0%}), {causes} with the right cause; audit names "
        f"the line of the mistake in {sum(lines)} of {len(lines)}{as_first}; false alarms on {len(false)} of "
        f"{len(rows) + len(correct)} correct programs{': ' if false else ''}{', '.join(false)}"
    )


# --- the page


def write_docs(record: dict[str, Any]) -> None:
    text = DOCS.read_text()
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    DOCS.write_text(f"{before}{tables(record)}{after}")


def tables(record: dict[str, Any]) -> str:
    """What stands in docs/silent-bugs.md, with its marks."""
    rows, correct = record["rows"], record["correct"]
    head = "| bug | reported | how | found | cause | line | what was named, or why nothing was | seconds |"
    lines = [
        BEGIN,
        "",
        f"**{summary(rows, correct)}.**",
        "",
        head,
        "| --- | --- | --- | --- | --- | --- | --- | ---: |",
    ]
    lines += [table_row(row) for row in rows]
    lines += ["", "The scripts without a mistake (each corrected one above was looked at, too):", ""]
    lines += ["| correct script | FAIL or WARN | seconds |", "| --- | --- | ---: |"]
    lines += [
        f"| `{name}` | {', '.join(one['alarms']) or 'none'} | {one['seconds']:.0f} |" for name, one in correct.items()
    ]
    return "\n".join([*lines, END])


def table_row(row: dict[str, Any]) -> str:
    said = {True: "yes", False: "no", None: "-"}
    cells = [f"[`{row['name']}`](../benchmarks/silent_bugs/{row['name']}.py)", link(row["reported"]), row["how"]]
    cells += [said[row["found"]], *(said[row[what]] if row["found"] else "-" for what in ("cause", "line"))]
    named = ": ".join(filter(None, [", ".join(row["rules"]), row["named"]])) if row["found"] else row["missed"]
    return f"| {' | '.join(cells)} | {named.replace('|', '&#124;')} | {row['seconds']:.0f} |"


def link(reported: str) -> str:
    """`[repository#12](https://github.com/owner/repository/issues/12)`; of another place its host."""
    address = reported.split()[0]
    found = re.search(r"github\.com/[\w.-]+/([\w.-]+)(?:/(?:issues|pull)/(\d+))?", address)
    label = f"{found[1]}{f'#{found[2]}' if found[2] else ''}" if found else address.split("/")[2]
    return f"[{label}]({address})"


if __name__ == "__main__":
    main()
