"""Start public scripts with `everyrank launch` and with torchrun, and compare the output of rank 0.

Run: python benchmarks/public_by_launch.py SOURCES [--json F] [NAME ...]

SOURCES has clones of the repositories as OWNER+NAME. The environment needs accelerate, lightning and transformers. Each
script runs on two CPU ranks. It is edited so that it runs without a GPU and a network, sets a seed and prints its
losses. The comparison ignores numbers with a unit of time or speed.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from silent_bugs import provenance


@dataclasses.dataclass(frozen=True)
class Script:
    """A public script.

    kind       the library or kind of parallelism that it uses
    folder     a folder of SOURCES, or the name of an installed package
    arguments  of its command line
    edits      (text before, text after)
    """

    kind: str
    folder: str
    file: str
    arguments: tuple[str, ...] = ()
    edits: tuple[tuple[str, str], ...] = ()


DESTROY = "torch.distributed.destroy_process_group()"  # without it, a rank may abort when it exits
SERIES = "pytorch+examples/distributed/ddp-tutorial-series"
ON_CPU = (
    ('    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))\n', "    torch.manual_seed(0)\n"),
    ('backend="nccl"', 'backend="gloo"'),
    ("model.to(self.gpu_id)", "model"),
    ("device_ids=[self.gpu_id]", ""),
    ("            source = source.to(self.gpu_id)\n            targets = targets.to(self.gpu_id)\n", ""),
    ("        loss.backward()\n", "        print(f'loss {loss.item()}')\n        loss.backward()\n"),
)
SMALL = ("--device=cpu", "--compile=False", "--backend=gloo", "--eval_iters=2", "--log_interval=1", "--block_size=32")
SMALL_GPT = (*SMALL, "--batch_size=4", "--n_layer=2", "--n_head=2", "--n_embd=32", "--max_iters=4", "--dataset=made_up")
SCRIPTS = {
    "pytorch/examples ddp/example.py": Script(
        "DDP",
        "pytorch+examples/distributed/ddp",
        "example.py",
        edits=(
            ("if not verify_min_gpu_count(min_gpus=_min_gpu_count):", "if False:"),
            ("        acc = torch.accelerator.current_accelerator()\n", ""),
            ("torch.distributed.get_default_backend_for_device(acc)", "'gloo'"),
            ("        torch.accelerator.set_device_index(rank)\n", "        torch.manual_seed(0)\n"),
            ("group with: {env_dict}", "group"),  # it prints a port, which differs between runs
            (".to(rank)", ""),
            ("device_ids=[rank]", ""),
            ('    print(f"training', '    print(outputs.sum().item())\n    print(f"training'),
        ),
    ),
    "ddp-tutorial-series/multigpu_torchrun.py": Script("DDP", SERIES, "multigpu_torchrun.py", ("2", "1"), ON_CPU),
    "ddp-tutorial-series/multinode.py": Script(
        "DDP",
        SERIES,
        "multinode.py",
        ("2", "1"),
        tuple((before.replace("gpu_id", "local_rank"), after) for before, after in ON_CPU),
    ),
    "nanoGPT train.py": Script(
        "DDP",
        "karpathy+nanoGPT",
        "train.py",
        (*SMALL_GPT, "--gradient_accumulation_steps=4"),
        (("    torch.cuda.set_device(device)\n", "    device = 'cpu'\n"), ("device_ids=[ddp_local_rank]", "")),
    ),
    "pytorch/examples FSDP2/example.py": Script(
        "FSDP2",
        "pytorch+examples/distributed/FSDP2",
        "example.py",
        edits=(
            ("if not verify_min_gpu_count(min_gpus=_min_gpu_count):", "if False:"),
            (", device_id=device)", ")"),
            ("        loss.backward()\n", "        print('loss', loss.item())\n        loss.backward()\n"),
        ),
    ),
    "tensor_parallelism/tensor_parallel_example.py": Script(
        "tensor parallel",
        "pytorch+examples/distributed/tensor_parallelism",
        "tensor_parallel_example.py",
        edits=(
            ("if not verify_min_gpu_count(min_gpus=_min_gpu_count):", "if False:"),
            ("torch.accelerator.current_accelerator().type", "'cpu'"),
            ("    output.sum().backward()\n", "    print('sum', output.sum().item())\n    output.sum().backward()\n"),
            ("# create model and move it to GPU", "torch.manual_seed(0)\n#"),
        ),
    ),
    "accelerate test_sync.py": Script("Accelerate", "accelerate.test_utils.scripts", "test_sync.py"),
    "accelerate test_ops.py": Script(
        "Accelerate",
        "accelerate.test_utils.scripts",
        "test_ops.py",
        edits=(("state = PartialState()", "state = PartialState(cpu=True)"),),
    ),
    "Lightning bug_report_model.py": Script(
        "Lightning",
        "Lightning-AI+pytorch-lightning/examples/pytorch/bug_report",
        "bug_report_model.py",
        edits=(
            ("    train_data = DataLoader(", "    torch.manual_seed(0)\n    train_data = DataLoader("),
            ("        max_epochs=1,\n", "        max_epochs=1,\n        accelerator='cpu',\n        devices=2,\n"),
        ),
    ),
    "transformers test_trainer_distributed.py": Script(
        "Trainer",
        "huggingface+transformers/tests/trainer",
        "test_trainer_distributed.py",
        ("--output_dir", "out", "--use_cpu", "True", "--report_to", "none", "--disable_tqdm", "True"),
        (
            (
                "dataset=train_dataset)\n    trainer.train()",
                "dataset=train_dataset)\n    trainer.train()\n    " + DESTROY,
            ),
        ),
    ),
}
_VARYING = re.compile(
    r"\d+(\.\d+)? ?(ms|s|sec|seconds|it/s|%)(?=\W|$)|mfu.*"
    r"|[\w_]*(runtime|per_second|_time)['\"]?: ?['\"]?[\d.e+-]+['\"]?"
    r"|\d\d:\d\d(:\d\d)?|\d{4}-\d\d-\d\d|pid \d+|\[\d+\]|0x[0-9a-f]+|/tmp/\S+|https?://\S+"
)


def prepare_script(script: Script, sources: Path, folder: Path) -> None:
    """Copy the folder of a script to `folder`, and edit the script."""
    if "." in script.folder and "/" not in script.folder and "+" not in script.folder:
        spec = importlib.util.find_spec(script.folder)
        source = Path(next(iter((spec and spec.submodule_search_locations) or [])))
    else:
        source = sources / script.folder
    shutil.copytree(source, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".git", "*.png"))
    text = (folder / script.file).read_text()
    for before, after in script.edits:
        assert before in text, (
            f"{script.file} does not contain {before!r}: check out the commit that this benchmark was written for"
        )
        text = text.replace(before, after)
    (folder / script.file).write_text(text)
    if "--dataset=made_up" in script.arguments:
        data = folder / "data" / "made_up"
        data.mkdir(parents=True)
        for name in ("train.bin", "val.bin"):
            (data / name).write_bytes(bytes(number for index in range(4000) for number in (index * 7 % 60, 0)))


def run_script(script: Script, command: list[str], sources: Path) -> tuple[int, list[str], float]:
    """Run a script, and return the exit status, the lines that rank 0 prints (without times), and the seconds."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare_script(script, sources, folder)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}
        environment["ACCELERATE_USE_CPU"] = "true"  # without it, each rank trains alone on a machine without a GPU
        start = time.monotonic()
        process = subprocess.run(
            [*command, script.file, *script.arguments],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
            env=environment,
        )
        seconds = time.monotonic() - start
    lines = [_VARYING.sub("", line.removeprefix("[default0]:")).strip() for line in process.stdout.splitlines()]
    if process.returncode:
        print(process.stderr[-1500:], file=sys.stderr)
    return process.returncode, [line for line in lines if line], seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ways = {
        "torchrun": [*torchrun, "--local-ranks-filter", "0"],
        "launch": [sys.executable, "-m", "everyrank", "launch", "--processes", "2"],
    }
    versions = {name: importlib.metadata.version(name) for name in ("accelerate", "lightning", "transformers")}
    keeps_rows = args.names and args.json and args.json.exists()  # rows of scripts that are not run now stay
    existing = json.loads(args.json.read_text())["rows"] if keeps_rows else []
    rows: dict[str, dict[str, Any]] = {row["script"]: row for row in existing}
    for name, script in SCRIPTS.items():
        if args.names and not any(fragment in name for fragment in args.names):
            continue
        results = {way: run_script(script, command, args.sources) for way, command in ways.items()}
        (status, lines, seconds), (launch_status, launch_lines, launch_seconds) = results["torchrun"], results["launch"]
        is_same = (status, lines) == (launch_status, launch_lines)
        row = {"script": name, "kind": script.kind, "status": [status, launch_status], "lines": len(lines)}
        rows[name] = {**row, "is_same": is_same, "seconds": [round(seconds, 1), round(launch_seconds, 1)]}
        print(f"{name}: {'same' if is_same else 'DIFFERENT'}, {rows[name]}", flush=True)
        if not is_same:
            different = [pair for pair in zip(lines, launch_lines, strict=False) if pair[0] != pair[1]][:3]
            print(f"  torchrun, launch: {different or (lines[-3:], launch_lines[-3:])}", flush=True)
        if args.json:
            ordered = [rows[key] for key in SCRIPTS if key in rows]
            text = json.dumps({"rows": ordered, **versions, "provenance": provenance()}, indent=1)
            args.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
