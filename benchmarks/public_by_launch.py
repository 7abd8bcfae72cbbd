"""Public scripts started by `everyrank launch` and by torchrun: is the output of rank 0 the same?

Run: python benchmarks/public_by_launch.py SOURCES [--json F] [NAME ...]

SOURCES has clones of the repositories, as OWNER+NAME. The environment needs accelerate, lightning and transformers.
Each script runs on two ranks and the CPU. Changes of a text are those that let it run without a GPU or network, a seed,
and printed losses.
Numbers with a unit of time or speed are left out of the comparison.
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
    """One script: its kind, its folder and file, its arguments, and changes of its text."""

    kind: str
    folder: str
    file: str
    words: tuple[str, ...] = ()
    edits: tuple[tuple[str, str], ...] = ()


DESTROY = "torch.distributed.destroy_process_group()"  # without it, a rank may abort at its end
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
            ("group with: {env_dict}", "group"),  # with a port
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
_TIMES = re.compile(
    r"\d+(\.\d+)? ?(ms|s|sec|seconds|it/s|%)(?=\W|$)|mfu.*"
    r"|[\w_]*(runtime|per_second|_time)['\"]?: ?['\"]?[\d.e+-]+['\"]?"
    r"|\d\d:\d\d(:\d\d)?|\d{4}-\d\d-\d\d|pid \d+|\[\d+\]|0x[0-9a-f]+|/tmp/\S+|https?://\S+"
)


def prepared(script: Script, sources: Path, folder: Path) -> None:
    """Copy the folder of a script, and change its text."""
    if "." in script.folder and "/" not in script.folder and "+" not in script.folder:
        spec = importlib.util.find_spec(script.folder)
        source = Path(next(iter((spec and spec.submodule_search_locations) or [])))
    else:
        source = sources / script.folder
    shutil.copytree(source, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".git", "*.png"))
    text = (folder / script.file).read_text()
    for before, after in script.edits:
        assert before in text, f"{script.file} has changed: {before!r}"
        text = text.replace(before, after)
    (folder / script.file).write_text(text)
    if "--dataset=made_up" in script.words:
        data = folder / "data" / "made_up"
        data.mkdir(parents=True)
        for name in ("train.bin", "val.bin"):
            (data / name).write_bytes(bytes(number for index in range(4000) for number in (index * 7 % 60, 0)))


def started(script: Script, command: list[str], sources: Path) -> tuple[int, list[str], float]:
    """Exit status, the lines of rank 0 without times, and seconds."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepared(script, sources, folder)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}
        environment["ACCELERATE_USE_CPU"] = "true"  # else each rank is alone without a GPU
        begin = time.monotonic()
        done = subprocess.run(
            [*command, script.file, *script.words],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
            env=environment,
        )
        seconds = time.monotonic() - begin
    lines = [_TIMES.sub("", line.removeprefix("[default0]:")).strip() for line in done.stdout.splitlines()]
    if done.returncode:
        print(done.stderr[-1500:], file=sys.stderr)
    return done.returncode, [line for line in lines if line], seconds


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
    is_again = args.names and args.json and args.json.exists()  # the other rows stay
    known = json.loads(args.json.read_text())["rows"] if is_again else []
    rows: dict[str, dict[str, Any]] = {row["script"]: row for row in known}
    for name, script in SCRIPTS.items():
        if args.names and not any(word in name for word in args.names):
            continue
        results = {way: started(script, command, args.sources) for way, command in ways.items()}
        (status, lines, seconds), (own_status, own_lines, own_seconds) = results["torchrun"], results["launch"]
        is_same = (status, lines) == (own_status, own_lines)
        row = {"script": name, "kind": script.kind, "status": [status, own_status], "lines": len(lines)}
        rows[name] = {**row, "is_same": is_same, "seconds": [round(seconds, 1), round(own_seconds, 1)]}
        print(f"{name}: {'same' if is_same else 'DIFFERENT'}, {rows[name]}", flush=True)
        if not is_same:
            different = [pair for pair in zip(lines, own_lines, strict=False) if pair[0] != pair[1]][:3]
            print(f"  {different or (lines[-3:], own_lines[-3:])}", flush=True)
        if args.json:
            ordered = [rows[each] for each in SCRIPTS if each in rows]
            text = json.dumps({"rows": ordered, **versions, "provenance": provenance()}, indent=1)
            args.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
