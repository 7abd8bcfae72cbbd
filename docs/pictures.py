"""Draw the pictures of the pages into docs/images: report.svg from the Record of make demo, and others.

python docs/pictures.py            write the SVG files; needs the extra `html`
python docs/pictures.py --audit    write audit.png, the page of a real audit; also needs Chromium
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from everyrank.layout import parse_layout
from everyrank.record import read_records

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
DIGITS = ROOT / "benchmarks" / "records" / "digits-cpu.json"
AUDITED = "benchmarks/silent_bugs/accumulation_ragged.py"
LAYOUT, RANKS = "pipeline:shard=2,tensor=2", 8
COLOURS = ("#cfe4f2", "#fbe3bf", "#c5e8dc", "#f6d3bd")
HEAD = (
    '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
    'width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
    'font-family="sans-serif" font-size="13" color="#222">\n<rect width="100%" height="100%" fill="#fff"/>'
)


def report() -> str:
    """What bench draws of the Record: speeds with their intervals, and where a step goes, beside each other."""
    from everyrank.report.charts import split, throughput

    records = read_records(DIGITS)
    parts: list[str] = []
    left, height = 0.0, 0.0
    for drawn in (throughput(records), split(records)):
        box = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', drawn)
        assert box is not None
        wide, high = float(box[1]), float(box[2])
        inner = drawn[drawn.index(">") + 1 : drawn.rindex("</svg>")].replace("currentColor", "#222")
        # two figures on one page: their clip paths must not share names
        inner = re.sub(r'(id="|url\(#|href="#)', rf"\g<1>f{len(parts)}-", inner)
        parts.append(
            f'<svg x="{left:g}" width="{wide:g}" height="{high:g}" viewBox="0 0 {wide:g} {high:g}">{inner}</svg>'
        )
        left, height = left + wide + 12, max(height, high)
    lines = [line.rstrip() for line in "\n".join(parts).splitlines()]
    return "\n".join([HEAD.format(width=round(left - 12), height=round(height)), *lines, "</svg>\n"])


def mesh() -> str:
    """The ranks of a layout with three axes: who is beside whom, and how they are numbered."""
    stages, shards, tensors = parse_layout(LAYOUT).mesh(RANKS).values()
    body: list[str] = [f'<text x="16" y="24" font-weight="bold">{LAYOUT} on {RANKS} ranks</text>']
    for stage in range(stages):
        left = 90 + stage * 290
        body.append(f'<text x="{left}" y="56">pipeline {stage}: its half of the blocks</text>')
        body += [f'<text x="{left + 110 * each}" y="78" fill="#666">tensor {each}</text>' for each in range(tensors)]
        for shard in range(shards):
            top = 88 + shard * 70
            if stage == 0:
                body.append(f'<text x="16" y="{top + 32}" fill="#666">shard {shard}</text>')
            for tensor in range(tensors):
                rank = (stage * shards + shard) * tensors + tensor
                x = left + tensor * 110
                fill = COLOURS[shard % len(COLOURS)]
                body.append(f'<rect x="{x}" y="{top}" width="96" height="54" rx="6" fill="{fill}" stroke="#888"/>')
                body.append(f'<text x="{x + 48}" y="{top + 32}" text-anchor="middle">rank {rank}</text>')
    foot = 88 + shards * 70 + 16
    body += [
        f'<text x="16" y="{foot}">one colour: the same samples. Tensor neighbours talk in every layer,</text>',
        f'<text x="16" y="{foot + 18}">shards in every block, stages twice a micro-batch.</text>',
    ]
    return "\n".join([HEAD.format(width=680, height=foot + 34), *body, "</svg>\n"])


def ranks() -> str:
    """Two hosts with eight devices each: rank over local rank."""
    body: list[str] = []
    for host in range(2):
        top = 12 + host * 112
        body.append(f'<rect x="8" y="{top}" width="724" height="100" rx="8" fill="{COLOURS[host]}" stroke="#888"/>')
        body.append(f'<text x="20" y="{top + 22}" font-weight="bold">host {host} (node rank {host})</text>')
        for local in range(8):
            x = 20 + local * 88
            body.append(f'<rect x="{x}" y="{top + 34}" width="80" height="54" rx="6" fill="#fff" stroke="#888"/>')
            body.append(f'<text x="{x + 40}" y="{top + 56}" text-anchor="middle">rank {host * 8 + local}</text>')
            body.append(f'<text x="{x + 40}" y="{top + 76}" text-anchor="middle" fill="#666">local {local}</text>')
    return "\n".join([HEAD.format(width=740, height=236), *body, "</svg>\n"])


def audit() -> None:
    """Audit the example of the README, and photograph the page that `audit --html` writes."""
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "audit.html"
        command = [sys.executable, "-m", "everyrank", "audit", "--html", str(page), AUDITED]
        subprocess.run(command, cwd=ROOT, check=False, timeout=300)  # noqa: S603  (its exit status is 1: a finding)
        options = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            f"--user-data-dir={folder}/chromium",
        ]
        shot = ["--window-size=1160,560", f"--screenshot={IMAGES / 'audit.png'}", page.as_uri()]
        subprocess.run(["chromium", *options, *shot], check=True, capture_output=True, timeout=120)  # noqa: S603, S607


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--audit", action="store_true", help="photograph the page of an audit")
    if parser.parse_args().audit:
        audit()
        sys.exit()
    for name, draw in {"report": report, "mesh": mesh, "ranks": ranks}.items():
        (IMAGES / f"{name}.svg").write_text(draw(), encoding="utf-8")
