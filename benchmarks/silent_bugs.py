"""Run `everyrank audit` or `everyrank verify` on each silent bug of the corpus, and count bugs found and false alarms.

Run: python benchmarks/silent_bugs.py [--blind [N]] [--json F] [--docs] [NAME ...]

Files of benchmarks/silent_bugs/ with `Kind: script` run under `everyrank audit`, first with the mistake and then with
--right, their smallest correction. Then the scripts of correct/ run. In files with `Kind: parallelize`, the function
runs under `everyrank.testing.assert_same_gradients`, which is the first check of `everyrank verify --layout FILE:MESH`,
first with the mistake and then with RIGHT=1. The columns:

found   audit reports a FAIL or WARN that it does not report for the corrected script; verify reports DIFFERENT
cause   the report has what the file's `Expected:` lists: for audit the rule, for verify all of the texts
line    a finding of audit shows the marked line, among at most four; verify names tensors instead
first   the marked line is the first of them; findings show the line to change most likely first

A false alarm is a FAIL or WARN for a corrected or a correct script, or DIFFERENT for a corrected function.

--docs writes the tables of docs/silent-bugs.md from the Record. NAME runs only these files, and with --json F replaces
their rows in F. --blind N audits a blind set. Sets 1 and 2 have 15 mistakes each, and 10 and 12 correct scripts. Sets 3
to 7 have 24 mistakes and 20 correct scripts each. Their writers knew neither the rules nor the corpus. Only the first
run of a set is blind, because the rules were improved with it afterwards. In a blind set, NAME.py is the correct script
and wrong/NAME.patch adds the mistake. Sets 3 to 7 run under `everyrank audit --compare`, and their Records have all
findings. A reader judges whether their cause is right.
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

CORPUS_FOLDER = Path(__file__).parent / "silent_bugs"
BLIND_SETS = {  # number -> folder
    1: CORPUS_FOLDER / "blind_set",
    **{int(folder.name[-1]): folder for folder in sorted(CORPUS_FOLDER.glob("blind_set_?"))},
}
RECORD = Path(__file__).parent / "records" / "silent-bugs-cpu.json"
DOCS_PAGE = Path(__file__).parents[1] / "docs" / "silent-bugs.md"
MISTAKE_MARK = "# <- the mistake"  # at the end of the wrong line
BEGIN_MARK, END_MARK = "<!-- generated: python benchmarks/silent_bugs.py --docs -->", "<!-- end -->"


def header_field(text: str, name: str) -> str:
    """Return the value of a field in a file's docstring: "gradient.scale" if it has `Expected: gradient.scale`."""
    match = re.search(rf"^{name}:\s*(.*?)$", text, re.MULTILINE)
    return match[1] if match else ""


# --- blind sets: a correct script and a patch


def apply_patch(text: str, patch: str) -> str:
    """Return the text with a unified diff applied. Raises ValueError if a line to keep or to remove does not match."""
    lines, patched_lines, position = text.splitlines(), [], 0
    for patch_line in patch.splitlines()[2:]:
        if hunk := re.match(r"@@ -(\d+)", patch_line):
            patched_lines += lines[position : int(hunk[1]) - 1]
            position = int(hunk[1]) - 1
        elif patch_line.startswith("+"):
            patched_lines.append(patch_line[1:])
        else:
            if lines[position : position + 1] != [patch_line[1:]]:
                raise ValueError(f"the patch does not fit: line {position + 1} should be {patch_line[1:]!r}")
            patched_lines += [] if patch_line.startswith("-") else [patch_line[1:]]
            position += 1
    return "\n".join([*patched_lines, *lines[position:]]) + "\n"


def copy_with_mistakes(blind_set: Path, folder: Path) -> Path:
    """Copy a blind set into `folder`, with two files for each pair: NAME.py with the mistake, and NAME_right.py."""
    copy = Path(shutil.copytree(blind_set, folder / blind_set.name))
    for patch in sorted((copy / "wrong").glob("*.patch")):
        script = copy / f"{patch.stem}.py"
        correct_text = script.rename(copy / f"{patch.stem}_right.py").read_text()
        script.write_text(apply_patch(correct_text, patch.read_text()))
    return copy


# --- scripts, under audit


def run_audit(script: Path, *script_args: str, audit_flags: tuple[str, ...] = ()) -> dict[str, Any]:
    """Audit a script and return the JSON of the audit, or {"error": [last line of stderr]}, with the seconds.

    script_args  arguments of the script
    audit_flags  further flags of `everyrank audit`
    """
    text = script.read_text()
    ranks = re.search(r"nproc-per-node (\d)", text) or re.search(r"needs (\d) ranks", text)
    default_ranks = "1" if f"python {script.name}" in text else "2"  # as in the command in its docstring
    with tempfile.TemporaryDirectory() as folder:
        out, start = Path(folder) / "audit.json", time.monotonic()
        command = [sys.executable, "-m", "everyrank", "audit"]
        if "spawn(" not in text:  # a script with spawn() starts its own ranks
            command += ["--processes", ranks[1] if ranks else default_ranks]
        process = subprocess.run(
            [*command, *audit_flags, "--json", str(out), str(script), *script_args],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        audit = json.loads(out.read_text()) if out.exists() else {"error": process.stderr.strip().splitlines()[-1:]}
    return {**audit, "seconds": round(time.monotonic() - start, 1)}


def alarms_by_rule(audit: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the first FAIL or WARN of each rule."""
    findings = reversed(audit.get("findings", []))
    return {finding["rule"]: finding for finding in findings if finding["level"] in ("FAIL", "WARN")}


def check_script(script: Path, audit_flags: tuple[str, ...] = ()) -> dict[str, Any]:
    """Audit a script with its mistake and corrected, and return its row of results.

    With `audit_flags`, the row has the findings in full.
    """
    text = script.read_text()
    mistake_line = next(number for number, line in enumerate(text.splitlines(), 1) if MISTAKE_MARK in line)
    corrected_script = script.with_name(f"{script.stem}_right.py")
    wrong_audit = run_audit(script, audit_flags=audit_flags)
    if corrected_script.exists():
        corrected_audit = run_audit(corrected_script, audit_flags=audit_flags)
    else:
        corrected_audit = run_audit(script, "--right", audit_flags=audit_flags)
    false_alarms = alarms_by_rule(corrected_audit)
    true_alarms = {rule: alarm for rule, alarm in alarms_by_rule(wrong_audit).items() if rule not in false_alarms}
    lines_by_alarm = [[location.rpartition("/")[2] for location in alarm["lines"]] for alarm in true_alarms.values()]
    marked_line = f"{script.name}:{mistake_line}"
    expected_rule = header_field(text, "Expected")
    rules = [expected_rule] * (expected_rule in true_alarms) + [rule for rule in true_alarms if rule != expected_rule]
    return {
        "how": "audit",
        "found": bool(true_alarms),
        "cause": expected_rule in true_alarms if expected_rule else None,
        "line": any(marked_line in lines for lines in lines_by_alarm),
        "first": any(marked_line == lines[0] for lines in lines_by_alarm if lines),
        "shown": [len(lines) for lines in lines_by_alarm],
        "rules": rules,
        "named": true_alarms[rules[0]]["text"] if rules else "",
        "error": (wrong_audit.get("error") or corrected_audit.get("error") or [""])[0],
        "false_alarms": list(false_alarms),
        "seconds": wrong_audit["seconds"],
        **(
            {
                "marked": mistake_line,
                "findings": alarm_details(true_alarms),
                "false_findings": alarm_details(false_alarms),
                "not_checked": wrong_audit.get("not_checked", []),
            }
            if audit_flags
            else {}
        ),
    }


def alarm_details(alarms: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the alarms as they are written to the Record, with file names instead of paths."""
    return [
        {
            "level": alarm["level"],
            "rule": rule,
            "lines": [location.rpartition("/")[2] for location in alarm["lines"]],
            "place": alarm["place"].rpartition("/")[2],
            "text": alarm["text"],
        }
        for rule, alarm in alarms.items()
    ]


# --- parallelize(model, mesh), under verify


def run_assert_same_gradients(file: Path, is_corrected: bool) -> tuple[str, float]:
    """Return the error message of `assert_same_gradients` for the function of a file, or "", and the seconds."""
    from everyrank.testing import assert_same_gradients

    start, module_name = time.monotonic(), f"{file.stem}_{is_corrected}"
    os.environ["RIGHT"] = "1" if is_corrected else ""
    try:
        spec = importlib.util.spec_from_file_location(module_name, file)
        assert spec is not None
        assert spec.loader is not None
        module: Any = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module  # functions can be sent to the ranks by value only if their module is here
        spec.loader.exec_module(module)
        mesh = {
            axis: int(size)
            for axis, _, size in (entry.partition("=") for entry in header_field(module.__doc__, "Mesh").split(","))
        }
        batch = module.inputs(0)
        takes_targets = len(inspect.signature(module.build().forward).parameters) == 2  # the loss is inside the model
        inputs = (batch if takes_targets else batch[0], batch[1])
        sequence_dim = 1 if "context" in mesh else None
        # some functions split tensors without DTensor, and these files do not describe how to gather the parts
        options = {"sequence_dim": sequence_dim, "allow_uncompared": ["*"]}
        assert_same_gradients(module.build, module.parallelize, inputs, module.terms, mesh, **options)
    except AssertionError as error:
        return str(error), time.monotonic() - start
    finally:
        del os.environ["RIGHT"]
        sys.modules.pop(module_name, None)
    return "", time.monotonic() - start


def check_parallelize(file: Path) -> dict[str, Any]:
    """Verify a parallelize function with its mistake and corrected, and return its row of results."""
    wrong_error, seconds = run_assert_same_gradients(file, is_corrected=False)
    corrected_error, _ = run_assert_same_gradients(file, is_corrected=True)
    expected_texts = header_field(file.read_text(), "Expected").split("; ")
    difference = wrong_error.partition("DIFFERENT: ")[2]
    return {
        "how": "verify",
        "found": bool(difference),
        "cause": bool(difference) and all(expected in difference for expected in expected_texts),
        "line": None,
        "rules": [],
        "named": difference,
        "error": "" if difference or not wrong_error else wrong_error,
        "false_alarms": [corrected_error] if corrected_error else [],
        "seconds": round(seconds, 1),
    }


# --- the whole corpus


def check_bug(file: Path, audit_flags: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the row of one bug: its name, the report, the results, and the reason if it was missed."""
    text = file.read_text()
    is_function = header_field(text, "Kind") == "parallelize"
    results = check_parallelize(file) if is_function else check_script(file, audit_flags)
    missed = "" if results["found"] and results["cause"] in (True, None) else header_field(text, "Missed")
    return {"name": file.stem, "reported": header_field(text, "Reported"), **results, "missed": missed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--blind", type=int, nargs="?", const=1, choices=BLIND_SETS)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--docs", action="store_true")
    args = parser.parse_args()
    if args.docs:
        write_docs(json.loads(RECORD.read_text()))
        return
    with tempfile.TemporaryDirectory() as scratch:
        run_folder(copy_with_mistakes(BLIND_SETS[args.blind], Path(scratch)) if args.blind else CORPUS_FOLDER, args)


def run_folder(folder: Path, args: argparse.Namespace) -> None:
    """Check the files of a folder, print the results, and write the Record."""
    rows: list[dict[str, Any]] = []
    audit_flags = ("--compare",) if args.blind and args.blind >= 3 else ()
    for file in sorted(folder.glob("*.py")):
        if MISTAKE_MARK in file.read_text() and (not args.names or file.stem in args.names):
            rows.append(check_bug(file, audit_flags))
            print(row_text(rows[-1]), flush=True)
    correct: dict[str, Any] = {}
    for script in sorted((folder / "correct").glob("*.py")) if not args.names else ():
        audit = run_audit(script, audit_flags=audit_flags)
        alarms, error = alarms_by_rule(audit), (audit.get("error") or [""])[0]
        correct[script.stem] = {"alarms": list(alarms), "error": error, "seconds": audit["seconds"]}
        if audit_flags:
            correct[script.stem]["findings"] = alarm_details(alarms)
        print(f"correct/{script.stem}: {', '.join(alarms) or error or 'no false alarm'}", flush=True)
    print(summary(rows, correct))
    if args.json:
        record = {"rows": rows, "correct": correct, "provenance": provenance()}
        if args.names and args.json.exists():  # keep the rows of files that were not run again
            record = replace_rows(json.loads(args.json.read_text()), rows)
        args.json.write_text(json.dumps(record, indent=1) + "\n")


def replace_rows(record: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the Record in which `rows` replace the rows with the same names."""
    new_rows = {row["name"]: row for row in rows}
    return {**record, "rows": [new_rows.get(row["name"], row) for row in record["rows"]], "provenance": provenance()}


def provenance() -> dict[str, Any]:
    """Return the version of torch, the number of cores and the date."""
    import torch

    return {"torch": torch.__version__, "cores": os.cpu_count(), "date": f"{datetime.now(UTC):%Y-%m-%d}"}


def row_text(row: dict[str, Any]) -> str:
    """Return a line such as `ragged_ranks: gradient.ragged (different line)`."""
    outcome = "not found"
    if row["found"]:
        outcome = ", ".join(row["rules"]) or row["named"]
        outcome += " (different cause)" * (row["cause"] is False) + " (different line)" * (row["line"] is False)
    false_alarms = f"  FALSE ALARM: {', '.join(row['false_alarms'])}" if row["false_alarms"] else ""
    return f"{row['name']}: {row['error'] or outcome}{false_alarms}"


def summary(rows: list[dict[str, Any]], correct: dict[str, Any]) -> str:
    """Return a sentence such as `51 of 58 found (88%), 50 with the right cause; ...`."""
    false_alarms = [row["name"] for row in rows if row["false_alarms"]]
    false_alarms += [name for name, result in correct.items() if result["alarms"]]
    shows_marked_line = [row["line"] for row in rows if row["line"] is not None and row["found"]]
    num_first = sum(bool(row.get("first")) for row in rows)
    num_lines = [count for row in rows for count in row.get("shown", ())]
    num_found, num_causes = sum(row["found"] for row in rows), sum(bool(row["cause"]) for row in rows)
    mean_lines = f"{sum(num_lines) / len(num_lines):.1f}" if num_lines else ""
    first_text = f", in {num_first} as the first of {mean_lines} lines that it shows" if num_lines else ""
    return (
        f"{num_found} of {len(rows)} found ({num_found / max(1, len(rows)):.0%}), {num_causes} with the right cause; "
        f"audit names the line of the mistake in {sum(shows_marked_line)} of {len(shows_marked_line)}{first_text}; "
        f"false alarms on {len(false_alarms)} of {len(rows) + len(correct)} correct programs"
        f"{': ' if false_alarms else ''}{', '.join(false_alarms)}"
    )


# --- the documentation page


def write_docs(record: dict[str, Any]) -> None:
    """Write the tables into docs/silent-bugs.md."""
    text = DOCS_PAGE.read_text()
    before, _, rest = text.partition(BEGIN_MARK)
    after = rest.partition(END_MARK)[2]
    DOCS_PAGE.write_text(f"{before}{make_tables(record)}{after}")


def make_tables(record: dict[str, Any]) -> str:
    """Return the generated part of docs/silent-bugs.md, with the marks around it."""
    rows, correct = record["rows"], record["correct"]
    header = "| bug | reported | how | found | cause | line | what was named, or why nothing was | seconds |"
    lines = [
        BEGIN_MARK,
        "",
        f"**{summary(rows, correct)}.**",
        "",
        header,
        "| --- | --- | --- | --- | --- | --- | --- | ---: |",
    ]
    lines += [make_table_row(row) for row in rows]
    lines += ["", "The scripts without a mistake (each corrected one above was looked at, too):", ""]
    lines += ["| correct script | FAIL or WARN | seconds |", "| --- | --- | ---: |"]
    lines += [
        f"| `{name}` | {', '.join(result['alarms']) or 'none'} | {result['seconds']:.0f} |"
        for name, result in correct.items()
    ]
    return "\n".join([*lines, END_MARK])


def make_table_row(row: dict[str, Any]) -> str:
    """Return the row of one bug in Markdown."""
    yes_or_no = {True: "yes", False: "no", None: "-"}
    cells = [f"[`{row['name']}`](../benchmarks/silent_bugs/{row['name']}.py)", report_link(row["reported"]), row["how"]]
    cells += [yes_or_no[row["found"]], *(yes_or_no[row[key]] if row["found"] else "-" for key in ("cause", "line"))]
    message = ": ".join(filter(None, [", ".join(row["rules"]), row["named"]])) if row["found"] else row["missed"]
    return f"| {' | '.join(cells)} | {message.replace('|', '&#124;')} | {row['seconds']:.0f} |"


def report_link(reported: str) -> str:
    """Return `[repository#12](https://github.com/owner/repository/issues/12)`, or the host name as the link text."""
    address = reported.split()[0]
    match = re.search(r"github\.com/[\w.-]+/([\w.-]+)(?:/(?:issues|pull)/(\d+))?", address)
    label = f"{match[1]}{f'#{match[2]}' if match[2] else ''}" if match else address.split("/")[2]
    return f"[{label}]({address})"


if __name__ == "__main__":
    main()
