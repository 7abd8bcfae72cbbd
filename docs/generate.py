"""Make the parts of README.md and of some pages of docs that follow from Records and from the code.

    python docs/generate.py            write them
    python docs/generate.py --check    name the first that is not as it would be written; exit status 1

A part stands between `<!-- generated: NAME -->` and `<!-- end -->`. The code structure lists folders in the order of
`tests/test_architecture.py`, each with the first sentence of its docstring; only the algorithms import torch.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Any

from everyrank.collectives.options import OPERATION_NAMES, size_text
from everyrank.commands.new import GROUPS
from everyrank.launch import LAUNCHERS
from everyrank.layout import STRATEGIES
from everyrank.options import BenchOptions, TrainOptions, VerifyOptions, arguments_of
from everyrank.record import Record, read_records
from everyrank.report import groups, markdown, tables

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "everyrank"
ORDER = ROOT / "tests" / "test_architecture.py"
DIGITS = ROOT / "benchmarks" / "records" / "digits-cpu.json"
PORT_MISTAKES = ROOT / "tests" / "port" / "test_port_mistakes.py"
PORTED = ROOT / "benchmarks" / "records" / "port-public-scripts-cpu.json"
PORTED_TO = {
    "Accelerate": ROOT / "benchmarks" / "records" / "port-public-scripts-accelerate-cpu.json",
    "Fabric": ROOT / "benchmarks" / "records" / "port-public-scripts-fabric-cpu.json",
}
WORKLOADS = ROOT / "benchmarks" / "records" / "port-public-scripts-workload-cpu.json"
TEXT_DEMO = ROOT / "benchmarks" / "records" / "text-demo-cpu.json"
FAMILIES = ROOT / "benchmarks" / "records" / "families-cpu.json"
EXPERTS = ROOT / "benchmarks" / "records" / "experts-cpu.json"
COLLECTIVES = ROOT / "benchmarks" / "records" / "collectives-cpu.json"
BACKENDS = ROOT / "benchmarks" / "records" / "backends-cpu.json"
GPU = ROOT / "benchmarks" / "records" / "gpu-h100.json"
H200 = ROOT / "benchmarks" / "records" / "gpu-h200.json"
OVERHEAD = ROOT / "benchmarks" / "records" / "overhead-cpu.json"
BY_LAUNCH = ROOT / "benchmarks" / "records" / "public-by-launch-cpu.json"
FAILURES = ROOT / "benchmarks" / "records" / "public-failures-cpu.json"
SILENT_BUGS = ROOT / "docs" / "silent-bugs.md"
ALGORITHMS = PACKAGE / "collectives" / "algorithms"
SHOWN_SIZES = (4, 64 * 2**10, 4 * 2**20, 64 * 2**20)  # bytes
WIDTH = 120


def demo_table(number: int, path: Path = DIGITS) -> str:
    """One of the tables that a bench prints: 0 the speeds, 1 where a step goes, 2 what it holds and sends."""
    [records] = groups(read_records(path))
    return markdown("", tables(records)[number][1]).partition("\n\n")[2].rstrip()


def demo_speeds() -> str:
    """The speeds of the layouts that ran, without the reasons why others did not."""
    return demo_table(0).partition("\n\n")[0]


def demo_checks() -> str:
    """What `make demo` compares with one process: the layouts that ran, of both workloads."""
    rows: list[list[str]] = []
    for record in [*read_records(DIGITS), *read_records(TEXT_DEMO)]:
        parity = record.parity
        if parity.status == "equal" and record.layout != "single" and parity.max_relative_difference is not None:
            scope = (parity.scope or "").split(",")[0]
            compared_with = "a simulation of it in one process" if record.layout == "local_sgd" else "one process"
            difference = f"{parity.max_relative_difference:.1e}"
            rows.append([record.workload, f"`{record.layout}`", "equal", difference, scope, compared_with])
    return _table(["workload", "layout", "parity", "largest difference of a loss", "compared", "with"], rows)


def loss_curves() -> str:
    """The loss after so many updates under each family, which one order of samples makes comparable."""
    shown = (0, 9, 29, 59, 119, 229)
    records = [record for record in read_records(FAMILIES) if len(record.loss) > shown[-1]]
    header = ["layout", *(f"update {update + 1}" for update in shown)]
    return _table(header, ([record.layout, *(f"{record.loss[at]:.4f}" for at in shown)] for record in records))


def layouts_measured() -> str:
    """What each family costs, in three numbers: speed beside one device, memory, bytes an update."""
    rows: list[list[str]] = []
    for record in read_records(FAMILIES):
        ratio = record.ratio_to_single
        sent = sum(each.bytes_per_update for each in record.collectives or [])
        memory = f"{record.peak_memory_bytes / 2**20:.1f}" if record.peak_memory_bytes else ""
        speed = f"{ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f})" if ratio else ""
        rows.append([f"`{record.layout}`", str(record.world_size), speed, memory, f"{sent / 2**10:,.1f}"])
    return _table(["layout", "ranks", "x single (95%)", "memory MiB", "sent KiB an update"], rows)


def checked_on_a_gpu() -> str:
    """The layouts that were compared with one process on a GPU."""
    rows = [row for row in json.loads(GPU.read_text(encoding="utf-8"))["rows"] if row["check"] == "layout"]
    of_run: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in rows:
        of_run.setdefault((row["workload"], str(row["ranks"]), row["backend"]), []).append(row)
    return _table(
        ["workload", "ranks", "backend", "layouts, all equal", "largest difference of a loss"],
        [
            [
                *(f"`{name}`" if index == 0 else name for index, name in enumerate(run)),
                ", ".join(f"`{row['layout']}`" for row in rows if row["status"] == "equal"),
                f"{max(row['difference'] for row in rows):.1e}",
            ]
            for run, rows in of_run.items()
        ],
    )


def cublas_bytes(row: dict[str, Any]) -> int:
    """The workspace of cuBLAS in a measured row: plan does not trace it, and later rows of a process had it before."""
    return 0 if row["alive_before"] else 2**26


def planned_on_a_gpu(record: Path = GPU) -> str:
    """Peak memory and time of an update on a GPU, measured and as plan predicts them."""
    rows = []
    for row in json.loads(record.read_text(encoding="utf-8"))["rows"]:
        if row["check"] not in ("steps", "memory") or "traced" not in row:
            continue
        measured = row["allocated"] - cublas_bytes(row)
        seconds = row.get("seconds")
        rows.append(
            [
                f"`{row['workload']}`",
                f"`{row['layout']}`",
                str(row.get("ranks", 1)),
                f"{measured / 2**20:,.0f}",
                f"{row['traced'] / measured - 1:+.1%}",
                f"{row['reserved'] / row['allocated']:.2f}",
                f"{1e3 * seconds:.1f}" if seconds else "",
                f"{row['error']:+.0%}" if seconds else "",
            ]
        )
    return _table(
        ["workload", "layout", "ranks", "peak MiB", "traced", "reserved / allocated", "update ms", "predicted"], rows
    )


def expandable_segments_on_a_gpu() -> str:
    """Memory that torch's allocator reserves, by default and with expandable segments, measured and predicted."""
    by_layout: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for row in json.loads(H200.read_text(encoding="utf-8"))["rows"]:
        if row["check"] in ("steps", "expandable") and "replayed" in row:
            by_layout.setdefault((row["workload"], row["layout"]), {})[row["check"]] = row
    rows = []
    for (workload, layout), by_check in by_layout.items():
        if len(by_check) < 2:  # the time was up before the second measurement
            continue
        cells = [f"`{workload}`", f"`{layout}`"]
        for check in ("steps", "expandable"):
            row = by_check[check]
            reserved = row["reserved"]
            predicted = row["replayed"]["reserved"] + cublas_bytes(row)
            cells += [f"{reserved / 2**20:,.0f}", f"{predicted / reserved - 1:+.1%}"]
        rows.append(cells)
    return _table(["workload", "layout", "reserved MiB", "plan", "expandable MiB", "plan"], rows)


CHINESE = {
    "reserved MiB": "保留（MiB）",
    "expandable MiB": "expandable_segments 下保留（MiB）",
    "plan": "plan 的误差",
    "layouts, all equal": "layout（全部等价）",
    "peak MiB": "峰值（MiB）",
    "traced": "追踪的误差",
    "reserved / allocated": "保留 / 已分配",
    "update ms": "一步（ms）",
    "predicted": "预测的误差",
    "workload": "workload",
    "compared": "比较步数",
    "with": "对照",
    "one process": "单进程",
    "a simulation of it in one process": "单进程模拟的 local SGD",
    "largest difference of a loss": "loss 的最大相对误差",
    "layout": "layout",
    "ranks": "rank 数",
    "parity": "是否等价",
    "samples/s (95%)": "样本/秒（95% 区间）",
    "x single": "速度相对 single",
    "x single (95%)": "速度相对 single（95% 区间）",
    "equal": "等价",
    "step ms": "一步（ms）",
    "epoch s": "一个 epoch（秒）",
    "eval loss": "验证 loss",
    "memory MiB": "内存（MiB）",
    "sent KiB an update": "每步发送（KiB）",
    "algorithm": "算法",
    "2 ranks: steps, sent": "2 个 rank：步数，发送量",
    "4 ranks: steps, sent": "4 个 rank：步数，发送量",
    "8 ranks: steps, sent": "8 个 rank：步数，发送量",
    "64 ranks: steps, sent": "64 个 rank：步数，发送量",
    "all_reduce by": "all_reduce 的实现",
    "gloo's own": "gloo 自带",
    "operation": "操作",
    "backend": "后端",
    "seconds": "耗时",
    "median and largest error": "误差：中位数，最大值",
    "all_reduce of": "all_reduce 的大小",
    "x the first, by means": "按均值的加速比",
    "x the first, by medians": "按中位数的加速比",
    "yes": "支持",
    "samples/s": "样本/秒",
    "x the first": "加速比",
    "exposed communication, ms an update": "每步未重叠的通信（ms）",
    "data ms": "数据（ms）",
    "forward ms": "前向（ms）",
    "backward ms": "反向（ms）",
    "optimizer ms": "优化器（ms）",
    "exposed communication ms": "未重叠的通信（ms）",
    "sum ms": "合计（ms）",
    "exposed": "未重叠的比例",
    "in how many collectives": "集合通信的次数",
    "none": "无",
    "start s": "启动（秒）",
    "first step ms": "第一步（ms）",
    "loop": "循环",
    "step us (95%)": "一步（us，95% 区间）",
    "x hand-written (95%)": "相对手写（95% 区间）",
    "us over it (95%)": "比手写多（us，95% 区间）",
    "losses apart": "loss 之差",
    "hand-written": "手写",
    "conventional": "常规写法",
    "conventional, shm": "常规写法，shm",
    "everyrank, shm": "everyrank，shm",
    "everyrank, batch_norm=local, shm": "everyrank，batch_norm=local，shm",
    "field": "字段",
    "flag": "选项",
    "default": "默认值",
    "meaning": "含义",
    "strategy": "策略",
    "each rank holds": "每个 rank 存什么",
    "exact": "是否等价",
    "launcher": "启动器",
    "how its ranks start": "rank 怎样启动",
    "what it is": "内容",
    "use it when": "适用场景",
    "its first command": "第一条命令",
    "Start here": "从这里开始",
    "Data parallel": "数据并行",
    "Models that do not fit on one device": "单个设备放不下的模型",
    "A complete training script": "完整的训练脚本",
    "Starting the ranks": "启动各个 rank",
    "Communication": "通信",
    "Parameter servers and RPC": "参数服务器与 RPC",
    "Your own model and data, for everyrank": "你自己的模型和数据，用于 everyrank",
    "bug": "bug",
    "reported": "报告",
    "how": "检查方式",
    "found": "找出",
    "cause": "原因",
    "line": "行",
    "what was named, or why nothing was": "指出的内容，或没有找出的原因（英文原文）",
    "correct script": "正确的脚本",
    "FAIL or WARN": "FAIL 或 WARN",
}
"""Of cells of the tables, what they are on the Chinese pages; all else stays as it is printed."""

# what the check or the audit reports of a mistake in a port, by the words that its test looks for
REPORTED = {
    "one rank's samples": "the loss; likely cause: it is that of one rank's samples",
    "the loss is": "the loss",
    "loss is": "the loss",
    "not averaged": "the gradients; likely cause: they are not averaged",
    "0.3333": "the gradients: a third of the original's on 3 ranks",
    "learning rates": "the learning rates",
    "gradients": "the gradients",
    "printed": "a printed line",
    "net.pt": "the file that each rank writes",
    "does not save net.pt": "the file that is not saved",
    "other keys": "the keys of the checkpoint",
    "prints on each rank": "the line that prints on each rank",
    "dropout masks are equal": "audit: the dropout masks are equal on all ranks",
    "fails": "the error of the port",
}
PORTED_IN_CHINESE = {
    "script": "脚本",
    "first run": "首次运行",
    "now": "现在",
    "difference": "差异",
    "lines": "行数",
    "s": "秒",
    "note": "说明",
    "equal": "等价",
    "not equal": "不等价",
    "refused": "拒绝",
    "layers train themselves in methods other than forward": "各层在 forward 以外的方法里自己训练",
    "the loss compares samples of a batch": "loss 比较同一个 batch 的样本",
    "an episode, not a batch, is trained on": "每次训练用一个 episode，而不是 batch",
}
"""Of the cells of the table of ported scripts."""

SCRIPTS_IN_CHINESE = {
    "script": "脚本",
    "kind": "类型",
    "output": "输出",
    "lines": "行数",
    "same": "相同",
    "different": "不同",
    "tensor parallel": "张量并行",
    "mistake": "错误",
    "it": "结果",
    "fails": "失败",
    "hangs": "挂起",
    "named on one host": "单机时指出",
    "named on two hosts": "两台主机时指出",
    "cause, rank, line": "原因、rank、行号",
    "cause, rank": "原因、rank",
    "rank, line": "rank、行号",
    "rank": "rank",
    "not run": "未运行",
}
"""Of the cells of the tables of public scripts under launch."""

CHINESE_SENTENCES = {
    "; dropout left out": "；去掉了 dropout",
    "dropout left out": "去掉了 dropout",
    "How many times as fast: by means, by medians. ": "加速比前一个按均值，后一个按中位数，都以第一个后端为 1。",
    "Over the starts: median (lowest to highest). ": "各次启动的中位数（最低～最高）。",
    "Medians over rounds, in which the backends take turns (lowest to highest ratio of a round). ": (
        "各后端轮流计时，取各轮的中位数（一轮内比值的最低～最高）。"
    ),
    "The scripts without a mistake (each corrected one above was looked at, too):": (
        "没有错误的脚本（上面每个改正后的脚本也检查过）："
    ),
}
"""Of the lines below the tables."""


CHINESE_PATTERNS = (
    (r" \((-?[\d.,]+) to (-?[\d.,]+)\)", r"（\1～\2）"),
    (r"x the first: ([^|]+) \|", r"加速比：\1 |"),
    (r"\| (\d+) updates (?=\|)", r"| \1 步 "),
    (r"(?<=\| )update (\d+)(?= \|)", r"第 \1 步"),
    (r"(\d+ [a-z-]+) in (\d+) updates(?= \|)", r"\1（每 \2 步）"),
    (r"(?<=\| )(\S+ [\d.]+), batch norm over ranks(?= \|)", r"\1，BN 跨 rank"),
    (r"(\*\*\w+\*\*), two ranks, (\d+) rounds", r"\1，两个 rank，\2 轮"),
    (r"(\*\*\w+\*\*), one process, (\d+) rounds", r"\1，单进程，\2 轮"),
    (r"([^。]+), (\d+) cores, (torch \S+), (\S+): (`[^`]+`)\.", r"\1，\2 核，\3，\4；数据在 \5。"),
    (
        r"([^。]+), (\d+) cores, (torch \S+), (\S+), medians: (`.+`), by (`.+`)\.",
        r"\1，\2 核，\3，\4；中位数；数据在 \5，由 \6 测得。",
    ),
    (r"([^。]+), (\d+) cores, (torch \S+), (\S+): (`.+`), by (`.+`)\.", r"\1，\2 核，\3，\4；数据在 \5，由 \6 测得。"),
    (
        r"\*\*(\d+) of (\d+) found \((\d+%)\), (\d+) with the right cause; audit names the line of the mistake "
        r"in (\d+) of (\d+), in (\d+) as the first of (\S+) lines that it shows; "
        r"false alarms on (\d+) of (\d+) correct programs\.\*\*",
        (
            r"**\2 个找出 \1 个（\3），其中 \4 个原因正确；\6 个里 audit 指出了 \5 个的出错行，"
            r"其中 \7 个排在所列的平均 \8 行的第一行；\10 个正确的程序误报 \9 个。**"
        ),
    ),
)
"""Of what has numbers in it."""


MISTAKES_IN_CHINESE = {
    "mistake": "错误",
    "reported": "报告的内容",
    "loss of a rank's own samples": "loss 只含本 rank 的样本",
    "weight of a full batch": "用了完整 batch 的权重",
    "no wrapper in training": "训练时没有经过包装",
    "wrapper of nothing": "包装没有起作用",
    "loss not multiplied by the ranks": "loss 没有乘以 rank 数",
    "loss shown is a rank's own": "显示的 loss 只是本 rank 的",
    "training batches not split": "训练 batch 没有切分",
    "order of its own on each rank": "各 rank 的顺序不同",
    "rest of a batch left out": "漏掉 batch 的余数",
    "last batch left out": "漏掉最后一个 batch",
    "learning rate scaled by the ranks": "学习率按 rank 数放大",
    "clipped by a part of the norm": "用部分范数裁剪",
    "gradients kept": "梯度没有清零",
    "count of a rank's own": "只计本 rank 的个数",
    "weight of a rank's own": "只用本 rank 的权重",
    "evaluation not added up": "评估没有求和",
    "evaluation added up, not split": "评估求了和，但没有切分",
    "evaluation padded": "评估有填充",
    "every rank saves": "每个 rank 都保存",
    "no rank 0 saves": "rank 0 没有保存",
    "keys of the wrapper": "保存了包装的键名",
    "every rank prints": "每个 rank 都打印",
    "one dropout mask for all": "所有 rank 的 dropout 掩码相同",
    "no process group": "没有进程组",
    "the loss; likely cause: it is that of one rank's samples": "loss；可能的原因：它只含本 rank 的样本",
    "the loss": "loss",
    "the gradients; likely cause: they are not averaged": "梯度；可能的原因：没有求平均",
    "the gradients: a third of the original's on 3 ranks": "梯度：在 3 个 rank 上是原来的三分之一",
    "the learning rates": "学习率",
    "the gradients": "梯度",
    "a printed line": "打印的一行",
    "the file that each rank writes": "每个 rank 都写的文件",
    "the file that is not saved": "没有保存的文件",
    "the keys of the checkpoint": "checkpoint 的键名",
    "the line that prints on each rank": "每个 rank 都打印的那一行",
    "audit: the dropout masks are equal on all ranks": "audit：所有 rank 的 dropout 掩码相同",
    "the error of the port": "移植脚本自身的报错",
}


def in_chinese(make: Callable[[], str], words: dict[str, str] | None = None) -> Callable[[], str]:
    """The same part for a Chinese page: the same numbers, with headers and the words around them in Chinese.

    `words` are cells that have a meaning of their own in this part, such as `{"yes": "是"}`.
    """
    known = {**CHINESE, **(words or {})}

    def made() -> str:
        lines = make().splitlines()
        for number, line in enumerate(lines):
            if line.startswith("| "):
                lines[number] = f"| {' | '.join(known.get(cell, cell) for cell in line[2:-2].split(' | '))} |"
            elif line.startswith("## "):
                lines[number] = f"## {known.get(line[3:], line[3:])}"
            for english, chinese in CHINESE_SENTENCES.items():
                lines[number] = lines[number].replace(english, chinese)
            for pattern, chinese in CHINESE_PATTERNS:
                lines[number] = re.sub(pattern, chinese, lines[number])
        return "\n".join(lines)

    return made


def silent_bugs() -> str:
    """The table that benchmarks/silent_bugs.py writes, with links as from docs/zh."""
    text = SILENT_BUGS.read_text(encoding="utf-8")
    return _part("python benchmarks/silent_bugs.py --docs", text).strip().replace("](../", "](../../")


def house() -> str:
    """The rooms and single files of the package, with the rooms inside them: what each is for."""
    rows: list[tuple[str, str]] = []
    for name in _order():
        folder = PACKAGE / name
        if not folder.is_dir():
            rows.append((f"  {name}.py", _sentence(folder.with_suffix(".py"))))
            continue
        rows.append((f"  {name}/", _sentence(folder / "__init__.py")))
        inner = sorted(folder.glob("*/__init__.py"))
        rows += [(f"    {path.parent.name}/", _sentence(path)) for path in inner]
    width = max(len(label) for label, _ in rows) + 2
    lines = [
        line
        for label, text in rows
        for line in textwrap.wrap(text, WIDTH, initial_indent=f"{label:{width}}", subsequent_indent=" " * width)
    ]
    return "\n".join(["```", "src/everyrank/", *lines, "```"])


def strategies() -> str:
    """What the header of each strategy says."""
    rows: list[list[str]] = []
    for name in STRATEGIES:
        module = PACKAGE.joinpath(*(STRATEGIES[name].header or STRATEGIES[name].module).split(".")[1:])
        path = module / "__init__.py" if module.is_dir() else module.with_suffix(".py")
        header = _header(path, "Memory", "Use when", "Exact")
        rows.append([f"`{name}`", *header])
    return _table(["strategy", "each rank holds", "use it when", "exact"], rows)


def option_fields(options: type[Any]) -> Callable[[], str]:
    """The fields of an options class that are also flags of its command."""

    def made() -> str:
        rows: list[list[str]] = []
        for name, (_, about) in arguments_of(options).items():
            default = getattr(options, name, None)
            text = about.help % {"default": default}
            rows.append([f"`{name}`", f"`{about.flag}`", f"`{default!r}`", text.replace("|", "\\|")])
        return _table(["field", "flag", "default", "meaning"], rows)

    return made


def launchers() -> str:
    """What the file of each launcher says in its first sentence."""
    rows: list[list[str]] = []
    for name in LAUNCHERS:
        [path] = (PACKAGE / "launch").rglob(f"{name}.py")
        rows.append([f"`{name}`", _sentence(path).removeprefix(f"{name}: ")])
    return _table(["launcher", "how its ranks start"], rows)


def recipes() -> str:
    """A table for each group of recipes, in reading order: from their headers the command, purpose, when to use it."""
    tables: list[str] = []
    for heading, names in GROUPS.items():
        rows: list[list[str]] = []
        for path in [PACKAGE / "recipes" / f"{name}.py" for name in names if name != "workload"]:
            text = _docstring(path)
            begin = text.partition("Run: ")[2].splitlines()[0].strip() if "Run: " in text else ""
            [use] = _header(path, "Use when")
            rows.append([f"`{path.stem}`", _sentence(path), use, f"`{begin.removesuffix(' &')}`"])
        if rows:
            table = _table(["`everyrank new`", "what it is", "use it when", "its first command"], rows)
            tables.append(f"## {heading}\n\n{table}")
    return "\n\n".join(tables)


def theory_of_algorithms() -> str:
    """Steps of the busiest rank and what it sends of 64 MiB, on a few numbers of ranks."""
    from everyrank.collectives.algorithms import ALGORITHMS as TABLE  # torch comes with it

    sizes = (2, 4, 8, 64)
    rows: list[list[str]] = []
    for name, algorithm in TABLE.items():
        cells: list[str] = []
        for size in sizes:
            ranks = [algorithm.traffic(rank, size, 2**24) for rank in range(size)]
            sent = max(rank.num_elements for rank in ranks) * 4 / 2**20
            cells.append(f"{max(rank.num_steps for rank in ranks):,}, {sent:,.0f} MiB")
        rows.append([name, *cells])
    return _table(["algorithm", *(f"{size} ranks: steps, sent" for size in sizes)], rows)


def measured_algorithms() -> str:
    """Median times of all-reduce by each algorithm, on 2 and 4 ranks."""
    if not COLLECTIVES.exists():
        return _not_measured()
    rows = [row for row in _measured("rows") if row["operation"] == "all_reduce" and row["backend"] == "gloo"]
    compared = {row["ranks"] for row in rows if row["algorithm"]}
    cells: dict[tuple[int, str], list[str]] = {}
    for ranks in sorted(compared):
        names = dict.fromkeys(row["algorithm"] or "gloo's own" for row in rows if row["ranks"] == ranks)
        for name in names:
            cells[ranks, name] = []
            for size in SHOWN_SIZES:
                found = [
                    row["p50_seconds"]
                    for row in rows
                    if (row["ranks"], row["algorithm"] or "gloo's own", row["num_bytes"]) == (ranks, name, size)
                ]
                cells[ranks, name].append(
                    _microseconds(found[0]) if found else ""
                )  # the run that compared them is first
    header = ["ranks", "all_reduce by", *(f"{size_text(size)}, us" for size in SHOWN_SIZES)]
    return f"{_table(header, [[str(ranks), name, *found] for (ranks, name), found in cells.items()])}\n\n{_source()}"


def measured_backends() -> str:
    """The line of each operation on each backend, and how many times as fast as the first it is; two ranks."""
    if not COLLECTIVES.exists():
        return _not_measured()
    lines = {
        (cost["operation"], cost["backend"]): cost  # the last run is the one of backends
        for cost in _measured("costs")
        if cost["algorithm"] is None and cost["ranks"] == 2
    }
    rows = [row for row in _measured("rows") if row["algorithm"] is None and row["ranks"] == 2]
    shown: list[list[str]] = []
    for name in OPERATION_NAMES:
        for (operation, backend), cost in lines.items():
            if operation == name:
                rate = cost["bytes_per_second"]
                text = f"{_microseconds(cost['latency_seconds'])} us" + (
                    f" + bytes / {rate / 1e9:.3g} GB/s" if rate else ""
                )
                own = [row for row in rows if (row["operation"], row["backend"]) == (operation, backend)]
                errors = f"{cost['median_error']:.0%}, {cost['largest_error']:.0%}"
                shown.append([name, backend, text, errors, *(_speedups(own, size) for size in SHOWN_SIZES)])
    header = ["operation", "backend", "seconds", "median and largest error"]
    header += [f"x the first: {size_text(size)}" for size in SHOWN_SIZES]
    return f"{_table(header, shown)}\n\nHow many times as fast: by means, by medians. {_source()}"


def _speedups(rows: list[dict[str, Any]], size: int) -> str:
    """Of the size that is nearest, where one is near: parts for each rank are rounded up."""
    near = [row for row in rows if size <= row["num_bytes"] < size * 1.1 + 16 and row["mean_speedup"] is not None]
    return f"{near[0]['mean_speedup']:.1f}, {near[0]['p50_speedup']:.1f}" if near else ""


def two_backends_alone() -> str:
    """All-reduce over two backends that take turns with no third, in several starts of two ranks."""
    if not COLLECTIVES.exists():
        return _not_measured()
    found: dict[int, dict[str, list[dict[str, Any]]]] = {}
    for row in _measured("starts"):
        found.setdefault(row["num_bytes"], {}).setdefault(row["backend"], []).append(row)
    shown: list[list[str]] = []
    for num_bytes, backends in found.items():
        first, other = backends.values()
        means = [f"{median(row['mean_seconds'] for row in rows) * 1e6:,.0f}" for rows in (first, other)]
        spreads: list[str] = []
        for key in ("mean_speedup", "p50_speedup"):
            ratios = sorted(row[key] for row in other)
            spreads.append(f"{median(ratios):.1f} ({ratios[0]:.1f} to {ratios[-1]:.1f})")
        shown.append([size_text(num_bytes), *means, *spreads])
    names = list(next(iter(found.values())))
    header = ["all_reduce of", *(f"{name}, us" for name in names), "x the first, by means", "x the first, by medians"]
    return f"{_table(header, shown)}\n\nOver the starts: median (lowest to highest). {_source()}"


def what_backends_carry() -> str:
    """Of each operation, whether each backend offers it, and with how many wrong elements."""
    if not COLLECTIVES.exists():
        return _not_measured()
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for row in sorted(_measured("rows"), key=lambda row: OPERATION_NAMES.index(row["operation"])):
        if row["algorithm"] is None:
            found.setdefault(row["operation"], {}).setdefault(row["backend"], []).append(row)
    backends = list(dict.fromkeys(backend for rows in found.values() for backend in rows))
    shown = [[name, *(_carried(rows.get(backend, [])) for backend in backends)] for name, rows in found.items()]
    return f"{_table(['operation', *backends], shown)}\n\n{_source()}"


def layouts_by_backend() -> str:
    """Of each layout on each backend: samples a second, how many times the first's, how long an update waits for it."""
    if not BACKENDS.exists():
        return f"Not measured yet: `python benchmarks/backends.py` makes `{BACKENDS.relative_to(ROOT)}`."
    found: dict[tuple[str, str], dict[str, list[Record]]] = {}
    for record in read_records(BACKENDS):
        if record.throughput_samples_per_second is not None:
            found.setdefault((record.workload, record.layout), {}).setdefault(record.backend, []).append(record)
    shown: list[list[str]] = []
    for (workload, layout), rounds in found.items():
        first = next(iter(rounds.values()))
        for backend, own in rounds.items():
            ratios = sorted(_rate(one) / _rate(other) for one, other in zip(own, first, strict=True))
            exposed = [one.breakdown_seconds.exposed_communication for one in own if one.breakdown_seconds is not None]
            spread = f"{median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})" if own is not first else ""
            waits = f"{1e3 * median(exposed):.2f}" if exposed else ""
            shown.append([workload, layout, backend, f"{median(map(_rate, own)):,.0f}", spread, waits])
    header = ["workload", "layout", "backend", "samples/s", "x the first", "exposed communication, ms an update"]
    about = read_records(BACKENDS)[0].provenance
    how = "Medians over rounds, in which the backends take turns (lowest to highest ratio of a round)."
    source = f"{_where(about)}: `{BACKENDS.relative_to(ROOT)}`, by `python benchmarks/backends.py`."
    return f"{_table(header, shown)}\n\n{how} {source}"


def step_beside_hand_written() -> str:
    """Of each loop, what a step takes beside the hand-written one's, workload by workload."""
    found: dict[str, list[Record]] = {}
    for record in read_records(OVERHEAD):
        found.setdefault(record.workload, []).append(record)
    header = ["loop", "step us (95%)", "x hand-written (95%)", "us over it (95%)", "losses apart"]
    parts: list[str] = []
    for workload, records in found.items():
        rows: list[list[str]] = []
        for record in records:
            own, step = record.provenance["overhead"], record.step_seconds
            assert step is not None
            ratio, extra = own["ratio_to_hand_written"], own["seconds_over_hand_written"]
            over = [f"{1e6 * extra[key]:,.1f}" for key in ("median", "low", "high")]
            rows.append([
                own["loop"],
                f"{1e6 * step.median:,.0f} ({1e6 * step.low:,.0f} to {1e6 * step.high:,.0f})",
                f"{ratio['median']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f})",
                f"{over[0]} ({over[1]} to {over[2]})",
                f"{own['largest_relative_loss_difference']:.0e}",
            ])  # fmt: skip
        ranks = "two ranks" if records[0].world_size > 1 else "one process"
        rounds = records[0].provenance["overhead"]["ratio_to_hand_written"]["rounds"]
        parts.append(f"**{workload}**, {ranks}, {rounds} rounds\n\n{_table(header, rows)}")
    about = read_records(OVERHEAD)[0].provenance
    return "\n\n".join([*parts, f"{_where(about)}: `{OVERHEAD.relative_to(ROOT)}`."])


def ported_scripts() -> str:
    """The table of public scripts that `everyrank port` was run on."""
    rows = json.loads(PORTED.read_text())["rows"]
    found = []
    for row in rows:
        where = re.sub(r"^https://github.com/|/blob/[0-9a-f]{40}", "", row["source"].partition(" ")[0])
        notes = [f"`--with {row['with']}`"] if row["with"] else []
        notes += ["dropout left out"] if row["without_dropout"] and row["result"] == "equal" else []
        notes += [row["rightly"]] if row["rightly"] else []
        gap = f"{row['largest']:.0e}" if row["result"] == "equal" else ""
        lines = f"{row['changed']}, {row['added']}, {row['helpers']}" if "changed" in row else ""
        found.append(
            [
                f"[{where}]({row['source'].partition(' ')[0]})",
                "" if row["seen"] else row["first_run"],
                row["result"],
                gap,
                lines,
                f"{row['seconds']:.0f}",
                "; ".join(notes),
            ]
        )
    header = ("script", "first run", "now", "difference", "lines", "s", "note")
    return _table(header, found)


def scripts_ported_to_libraries() -> str:
    """Public scripts that were ported to Accelerate and to Fabric: the result and the largest difference of each."""
    targets = {
        title: {row["name"]: row for row in json.loads(path.read_text())["rows"]} for title, path in PORTED_TO.items()
    }
    found: list[list[str]] = []
    for row in json.loads(PORTED.read_text())["rows"]:
        results = [rows.get(row["name"]) for rows in targets.values()]
        if any(results):
            where = re.sub(r"^https://github.com/|/blob/[0-9a-f]{40}", "", row["source"].partition(" ")[0])
            cells = [cell for each in results for cell in _ported_cells(each)]
            why = next((each["rightly"] for each in results if each is not None and each["rightly"]), "")
            found.append([f"[{where}]({row['source'].partition(' ')[0]})", *cells, why])
    return _table(("script", *(name for title in targets for name in (title, "difference")), "note"), found)


def _ported_cells(row: dict[str, Any] | None) -> list[str]:
    """The result of a script, and its largest difference; empty for one that was not run."""
    if row is None:
        return ["", ""]
    return [row["result"], f"{row['largest']:.0e}" if row["result"] == "equal" else ""]


def workloads_of_scripts() -> str:
    """The table of public scripts that `everyrank port --to workload` was run on."""
    found: list[list[str]] = []
    for row in json.loads(WORKLOADS.read_text())["rows"]:
        where = re.sub(r"^https://github.com/|/blob/[0-9a-f]{40}", "", row["source"].partition(" ")[0])
        is_equal = row["result"] == "equal"
        note = row["rightly"] or ("dropout left out" if row["without_dropout"] and is_equal else "")
        found.append(
            [
                f"[{where}]({row['source'].partition(' ')[0]})",
                row["first_run"],
                row["result"],
                f"{row['largest']:.0e}" if is_equal else "",
                str(row["lines"]) if is_equal else "",
                note,
            ]
        )
    return _table(("script", "first run", "now", "difference", "lines", "note"), found)


def mistakes_in_ports() -> str:
    """The mistakes that tests put into a port, and what is reported of each."""
    tree = ast.parse(PORT_MISTAKES.read_text())
    values = next(
        each.value
        for each in tree.body
        if isinstance(each, ast.Assign) and isinstance(each.targets[0], ast.Name) and each.targets[0].id == "MISTAKES"
    )
    mistakes = ast.literal_eval(values)
    return _table(("mistake", "reported"), [[name, REPORTED[words]] for name, (_, _, words) in mistakes.items()])


def scripts_by_launch() -> str:
    """Public scripts by launch and by torchrun: is the output of rank 0 the same?"""
    rows = json.loads(BY_LAUNCH.read_text(encoding="utf-8"))["rows"]
    cells = ([row["script"], row["kind"], "same" if row["is_same"] else "different", str(row["lines"])] for row in rows)
    return _table(("script", "kind", "output", "lines"), cells)


def mistakes_by_launch() -> str:
    """Mistakes in public scripts: what the message of launch names, on one host and on two."""
    rows = json.loads(FAILURES.read_text(encoding="utf-8"))["rows"]
    by_name: dict[str, dict[str, str]] = {}
    for row in rows:
        cells = by_name.setdefault(row["name"], {"kind": row["kind"], "script": row["script"]})
        cells[row["how"]] = ", ".join(key for key in ("cause", "rank", "line") if row[key])
    header = ("mistake", "it", "script", "named on one host", "named on two hosts")
    return _table(
        header,
        (
            [name, cells["kind"], cells["script"], cells.get("launch", "not run"), cells.get("two hosts", "not run")]
            for name, cells in by_name.items()
        ),
    )


def _where(about: dict[str, Any]) -> str:
    """The machine and the day of a Record, of its provenance."""
    return f"{about['processor']}, {about['cores']} cores, torch {about['torch']}, {about['time'][:10]}"


def _rate(record: Record) -> float:
    """Samples a second."""
    assert record.throughput_samples_per_second is not None
    return record.throughput_samples_per_second.median


def _carried(rows: list[dict[str, Any]]) -> str:
    refused = next((row["refused"] for row in rows if row["refused"]), None)
    wrong = sum(row["num_wrong"] for row in rows)
    if refused is not None:
        return f"no: {refused}".replace("|", "\\|")
    return f"{wrong:,} wrong elements" if wrong else "yes" if rows else ""


def _measured(key: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(COLLECTIVES.read_text(encoding="utf-8"))[key]
    return found


def _microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:,.0f}" if seconds >= 1e-4 else f"{seconds * 1e6:.1f}"


def _not_measured() -> str:
    return f"Not measured yet: `python benchmarks/collectives.py` makes `{COLLECTIVES.relative_to(ROOT)}`."


def _source() -> str:
    about = json.loads(COLLECTIVES.read_text(encoding="utf-8"))["provenance"]
    return (
        f"{about['processor']}, {about['cores']} cores, torch {about['torch']}, {about['date'][:10]}, medians: "
        f"`{COLLECTIVES.relative_to(ROOT)}`, by `python benchmarks/collectives.py`."
    )


PARTS: dict[str, dict[str, tuple[Path, Callable[[], str]]]] = {
    "README.md": {
        "the checks of make demo": (TEXT_DEMO, demo_checks),
    },
    "README.zh.md": {
        "the checks of make demo": (TEXT_DEMO, in_chinese(demo_checks)),
    },
    "docs/code-structure.md": {
        "the code structure": (PACKAGE, house),
        "strategies": (PACKAGE / "strategies", strategies),
        "launchers": (PACKAGE / "launch", launchers),
    },
    "docs/zh/code-structure.md": {
        "the code structure": (PACKAGE, house),
        "strategies": (PACKAGE / "strategies", in_chinese(strategies, {"yes": "yes"})),
        "launchers": (PACKAGE / "launch", in_chinese(launchers)),
    },
    "docs/api.md": {
        f"fields of {options.__name__}": (PACKAGE / "options.py", option_fields(options))
        for options in (TrainOptions, VerifyOptions, BenchOptions)
    },
    "docs/zh/api.md": {
        f"fields of {options.__name__}": (PACKAGE / "options.py", in_chinese(option_fields(options)))
        for options in (TrainOptions, VerifyOptions, BenchOptions)
    },
    "docs/port.md": {
        "ported scripts": (PORTED, ported_scripts),
        "mistakes in ports": (PORT_MISTAKES, mistakes_in_ports),
    },
    "docs/port-targets.md": {
        "scripts ported to libraries": (PORTED_TO["Accelerate"], scripts_ported_to_libraries),
        "workloads of scripts": (WORKLOADS, workloads_of_scripts),
    },
    "docs/any-script.md": {
        "scripts by launch": (BY_LAUNCH, scripts_by_launch),
        "mistakes by launch": (FAILURES, mistakes_by_launch),
    },
    "docs/zh/any-script.md": {
        "scripts by launch": (BY_LAUNCH, in_chinese(scripts_by_launch, SCRIPTS_IN_CHINESE)),
        "mistakes by launch": (FAILURES, in_chinese(mistakes_by_launch, SCRIPTS_IN_CHINESE)),
    },
    "docs/zh/port.md": {
        "ported scripts": (PORTED, in_chinese(ported_scripts, PORTED_IN_CHINESE)),
        "mistakes in ports": (PORT_MISTAKES, in_chinese(mistakes_in_ports, MISTAKES_IN_CHINESE)),
    },
    "docs/zh/port-targets.md": {
        "scripts ported to libraries": (
            PORTED_TO["Accelerate"],
            in_chinese(scripts_ported_to_libraries, PORTED_IN_CHINESE),
        ),
        "workloads of scripts": (WORKLOADS, in_chinese(workloads_of_scripts, PORTED_IN_CHINESE)),
    },
    "docs/recipes.md": {"recipes": (PACKAGE / "recipes", recipes)},
    "docs/zh/recipes.md": {"recipes": (PACKAGE / "recipes", in_chinese(recipes))},
    "docs/zh/silent-bugs.md": {
        "public bugs": (SILENT_BUGS, in_chinese(silent_bugs, {"yes": "是", "no": "否", "seconds": "秒"}))
    },
    "docs/which-layout.md": {"layouts measured": (FAMILIES, layouts_measured)},
    "docs/zh/which-layout.md": {"layouts measured": (FAMILIES, in_chinese(layouts_measured))},
    "docs/performance.md": {
        "the speeds of make demo": (DIGITS, demo_speeds),
        "where a step of make demo goes": (DIGITS, lambda: demo_table(1)),
        "what the layouts of make demo hold and send": (DIGITS, lambda: demo_table(2)),
    },
    "docs/zh/performance.md": {
        "the speeds of make demo": (DIGITS, in_chinese(demo_speeds)),
        "where a step of make demo goes": (DIGITS, in_chinese(lambda: demo_table(1))),
        "what the layouts of make demo hold and send": (DIGITS, in_chinese(lambda: demo_table(2))),
    },
    "docs/benchmarks.md": {
        "step beside hand-written": (OVERHEAD, step_beside_hand_written),
        "all families": (FAMILIES, lambda: demo_table(0, FAMILIES)),
        "what all families send": (FAMILIES, lambda: demo_table(2, FAMILIES)),
        "losses of all families": (FAMILIES, loss_curves),
        "experts": (EXPERTS, lambda: demo_table(0, EXPERTS)),
        "what experts send": (EXPERTS, lambda: demo_table(2, EXPERTS)),
    },
    "docs/zh/benchmarks.md": {
        "step beside hand-written": (OVERHEAD, in_chinese(step_beside_hand_written)),
        "all families": (FAMILIES, in_chinese(lambda: demo_table(0, FAMILIES))),
        "what all families send": (FAMILIES, in_chinese(lambda: demo_table(2, FAMILIES))),
        "losses of all families": (FAMILIES, in_chinese(loss_curves)),
        "experts": (EXPERTS, in_chinese(lambda: demo_table(0, EXPERTS))),
        "what experts send": (EXPERTS, in_chinese(lambda: demo_table(2, EXPERTS))),
    },
    "docs/collectives.md": {
        "theory of the algorithms": (ALGORITHMS, theory_of_algorithms),
        "measured algorithms": (COLLECTIVES, measured_algorithms),
        "measured backends": (COLLECTIVES, measured_backends),
        "two backends alone": (COLLECTIVES, two_backends_alone),
    },
    "docs/zh/collectives.md": {
        "theory of the algorithms": (ALGORITHMS, in_chinese(theory_of_algorithms)),
        "measured algorithms": (COLLECTIVES, in_chinese(measured_algorithms)),
        "measured backends": (COLLECTIVES, in_chinese(measured_backends)),
        "two backends alone": (COLLECTIVES, in_chinese(two_backends_alone)),
    },
    "docs/gpu.md": {
        "checked on a GPU": (GPU, checked_on_a_gpu),
        "planned on a GPU": (GPU, planned_on_a_gpu),
        "expandable segments on a GPU": (H200, expandable_segments_on_a_gpu),
        "planned on an H200": (H200, lambda: planned_on_a_gpu(H200)),
    },
    "docs/zh/gpu.md": {
        "checked on a GPU": (GPU, in_chinese(checked_on_a_gpu)),
        "planned on a GPU": (GPU, in_chinese(planned_on_a_gpu)),
        "expandable segments on a GPU": (H200, in_chinese(expandable_segments_on_a_gpu)),
        "planned on an H200": (H200, in_chinese(lambda: planned_on_a_gpu(H200))),
    },
    "docs/backends.md": {
        "what backends carry": (COLLECTIVES, what_backends_carry),
        "layouts by backend": (BACKENDS, layouts_by_backend),
    },
    "docs/zh/backends.md": {
        "what backends carry": (COLLECTIVES, in_chinese(what_backends_carry)),
        "layouts by backend": (BACKENDS, in_chinese(layouts_by_backend)),
    },
}
"""Of each page, its parts: (what it is made from, how)."""


def renewed(page: str, text: str) -> str:
    """The text of a page with its parts as they should be. Raises `ValueError` where one is not there once."""
    for name, (_, make) in PARTS[page].items():
        begin, end = f"<!-- generated: {name} -->\n", "\n<!-- end -->"
        if text.count(begin) != 1 or end not in text.partition(begin)[2].partition("<!-- generated:")[0]:
            raise ValueError(f'{page}: give "{begin.strip()}" once, and "{end.strip()}" after it')
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}{make()}{end}{rest.partition(end)[2]}"
    return text


def complaint(page: str, text: str) -> str:
    """What is wrong with a page, in one line; "" where nothing is."""
    try:
        new = renewed(page, text)
    except ValueError as error:
        return str(error)
    if new == text:
        return ""
    changed = next(name for name in PARTS[page] if _part(name, new) != _part(name, text))
    source = PARTS[page][changed][0].relative_to(ROOT)
    return f'{page}: "{changed}" is not what {source} gives; run: python docs/generate.py'


def main(arguments: list[str] | None = None) -> int:
    """Write the pages, or check them; the exit status."""
    parser = argparse.ArgumentParser(
        prog="docs/generate.py", description="Make what in the pages follows from the code."
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; 1 where a page is not as it would be written"
    )
    parser.add_argument(
        "--pages", type=Path, default=ROOT, metavar="DIR", help="where they are (default: this checkout)"
    )
    args = parser.parse_args(arguments)
    texts = {page: (args.pages / page).read_text(encoding="utf-8") for page in PARTS}
    if args.check:
        found = next(filter(None, map(complaint, texts, texts.values())), "")
        if found:
            print(found, file=sys.stderr)
        return 1 if found else 0
    try:
        new = {page: renewed(page, text) for page, text in texts.items()}
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    for page, text in new.items():
        (args.pages / page).write_text(text, encoding="utf-8")
    return 0


def _part(name: str, text: str) -> str:
    return text.partition(f"<!-- generated: {name} -->")[2].partition("<!-- end -->")[0]


def _order() -> list[str]:
    """The rooms and files of the package, each before those that import it."""
    for node in ast.parse(ORDER.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "ORDER":
            return ast.literal_eval(node.value)
    raise ValueError(f"{ORDER}: no list ORDER")


def _docstring(path: Path) -> str:
    return ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""


def _sentence(path: Path) -> str:
    """The first sentence of a module's docstring, without its full stop."""
    first = " ".join(_docstring(path).partition("\n\n")[0].split())
    return re.split(r"\.(?: |$)", first, maxsplit=1)[0]


def _header(path: Path, *keywords: str) -> list[str]:
    """Return the text after each keyword of a strategy's docstring, such as `Memory` and `Use when`."""
    found: dict[str, str] = {}
    keyword = ""
    for line in _docstring(path).splitlines():
        new = re.match(r"([A-Z][a-z]+(?: [a-z]+)?) {2,}(?=\S)", line)
        if new:
            keyword = new.group(1)
            found[keyword] = line[new.end() :]
        elif keyword and line.startswith("  "):
            found[keyword] += f" {line.strip()}"
        else:
            keyword = ""
    for keyword in keywords:
        if keyword not in found:
            raise ValueError(f"{path.relative_to(ROOT)}: its docstring has no line `{keyword}`; write one")
    return [found[keyword] for keyword in keywords]


def _table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    cells = [list(header), *map(list, rows)]
    cells.insert(1, ["---"] * len(cells[0]))
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


if __name__ == "__main__":
    sys.exit(main())
