"""Put bugs into public scripts so that they fail or hang, and check that the message names the rank and the line.

Run: python benchmarks/public_failures.py SOURCES [--how HOW ...] [--json F] [NAME ...]

SOURCES and the scripts are those of public_by_launch.py. There are five failures and twelve hangs. A bug is an edit of
the script. Each script is started by `everyrank launch` with two ranks: on one host (gloo), and on two hosts in network
namespaces, which needs root. The rank at fault is expected at a line that ends in "# cause", and the other rank at a
line that ends in "# waits".
"""

# ruff: noqa: E501  (an edit is a text before and a text after)
from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from public_by_launch import SCRIPTS, prepare_script
from silent_bugs import provenance

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from integration.conftest import Hosts, free_port

TIMEOUT_SECONDS = 4  # of `everyrank launch`
LIMIT_SECONDS = 120  # a script without a message is stopped after this time
RANK = 'int(__import__("os").environ["RANK"])'
SLEEP = '__import__("time").sleep(600)'


@dataclasses.dataclass(frozen=True)
class Mistake:
    """A bug in a script of `SCRIPTS`.

    edits    (file, text before, text after); an empty file name stands for the script
    phrase   a pattern that the message must match: the cause
    rank     the rank at fault
    """

    script: str
    edits: tuple[tuple[str, str, str], ...]
    phrase: str
    rank: int = 1


NANO, SERIES, NODES = "nanoGPT train.py", "ddp-tutorial-series/multigpu_torchrun.py", "ddp-tutorial-series/multinode.py"
FSDP2, TENSOR = "pytorch/examples FSDP2/example.py", "tensor_parallelism/tensor_parallel_example.py"
OPS, SYNC = "accelerate test_ops.py", "accelerate test_sync.py"
LIGHTNING, TRAINER = "Lightning bug_report_model.py", "transformers test_trainer_distributed.py"
BACKWARD = ("", "        loss.backward()\n", "        loss.backward()  # waits\n")
WORKER = ("", "        batch_size=batch_size,\n", "        batch_size=batch_size,\n        num_workers=1,\n")
ITEM = "        return self.data[index]"

DISTRIBUTED = """behaves properly
    model, ddp_model, dataloader = get_training_setup(accelerator)
    # Use a single batch
    ddp_input, ddp_target = next(iter(dataloader)).values()
    for iteration in range(3):
        # Gather the distributed inputs and targs for the base model
        input, target = accelerator.gather((ddp_input, ddp_target))
"""

FAILURES = {
    "token outside the vocabulary": Mistake(
        NANO,
        (
            ("", "    return x, y\n", f"    x[0, 0] = 10**6 if {RANK} else 0\n    return x, y\n"),
            ("model.py", "wte(idx) # token", "wte(idx) # cause\n        # token"),
        ),
        "IndexError",
    ),
    "broken sample in a loader worker": Mistake(
        SERIES,
        (
            WORKER,
            (
                "datautils.py",
                ITEM,
                f'        if {RANK} and index > 500:\n            raise ValueError("broken")  # cause\n{ITEM}',
            ),
        ),
        "ValueError: broken",
    ),
    "killed, as for memory": Mistake(
        FSDP2,
        (
            (
                "",
                "        optim.step()\n",
                f"        optim.step()\n        {RANK} and [{SLEEP.replace('600', '2')}, os.kill(os.getpid(), 9)]  # cause\n",
            ),
        ),
        "ended by SIGKILL",
    ),
    "batch of another form": Mistake(
        LIGHTNING,
        (
            (
                "",
                '        loss = self(batch).sum()\n        self.log("train_loss"',
                f"        loss = self(batch['image'] if {RANK} else batch).sum()  # cause\n        self.log(\"train_loss\"",
            ),
        ),
        "IndexError|TypeError",
    ),
    "exit with a status": Mistake(
        OPS,
        (
            (
                "",
                '    reduced_tensor = reduce(tensor, "sum")\n',
                f'    {RANK} and __import__("sys").exit(3)  # cause\n    reduced_tensor = reduce(tensor, "sum")\n',
            ),
        ),
        "exited with status 3",
    ),
}
HANGS = {
    "metric reduced on rank 0 only": Mistake(
        NANO,
        (
            (
                "",
                "        losses = estimate_loss()\n",
                "        losses = estimate_loss()\n        torch.distributed.all_reduce(losses['val'])  # waits\n",
            ),
            ("", "        scaler.scale(loss).backward()\n", "        scaler.scale(loss).backward()  # cause\n"),
        ),
        "mismatch|ended by a library|by a library in C",
    ),
    "snapshot on a file system that does not answer": Mistake(
        SERIES,
        (
            BACKWARD,
            (
                "",
                "        torch.save(snapshot",
                f'        {RANK} or __import__("subprocess").run(["sleep", "600"])  # cause\n        torch.save(snapshot',
            ),
        ),
        "rank 0 never reached all_reduce",
        rank=0,
    ),
    "loader worker that does not answer": Mistake(
        SERIES,
        (
            BACKWARD,
            WORKER,
            ("", "iter(self.train_data))[0])\n", "iter(self.train_data))[0])  # cause\n"),
            ("datautils.py", ITEM, f"        if {RANK} and index > 500:\n            {SLEEP}\n{ITEM}"),
        ),
        "it waits for its data loader",
    ),
    "rank without a batch returns": Mistake(
        "pytorch/examples ddp/example.py",
        (
            (
                "",
                "    labels = torch.randn(20, 5)\n",
                "    labels = torch.randn(20, 5)\n    if rank == 1:\n        return\n",
            ),
            ("", "    loss_fn(outputs, labels).backward()\n", "    loss_fn(outputs, labels).backward()  # waits\n"),
        ),
        "rank 1 never reached all_reduce",
    ),
    "checkpoint of FSDP on rank 0 only": Mistake(
        FSDP2,
        (
            (
                "",
                "    checkpointer.save(model, optim)\n",
                f"    {RANK} or checkpointer.save(model, optim)\n    {RANK} and {SLEEP}  # cause\n",
            ),
            (
                "checkpoint.py",
                "            full_param = sharded_param.full_tensor()\n",
                "            full_param = sharded_param.full_tensor()  # waits\n",
            ),
        ),
        "rank 1 never reached all_gather",
    ),
    "gradients clipped on one rank": Mistake(
        FSDP2,
        (
            (
                "",
                "        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)\n",
                f"        {RANK} or torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)  # waits\n",
            ),
            ("", "        loss = model(x).sum()\n", "        loss = model(x).sum()  # cause\n"),
        ),
        "mismatch",
    ),
    "gather on the main process": Mistake(
        OPS,
        (
            (
                "",
                "    obj = [state.process_index]\n",
                "    obj = [state.process_index]\n    state.is_main_process and gather(torch.ones(5))  # waits\n",
            ),
            ("", "    gathered_obj = gather_object(obj)\n", "    gathered_obj = gather_object(obj)  # cause\n"),
        ),
        "mismatch|ended by a library|by a library in C",
    ),
    "wait_for_everyone on the main process": Mistake(
        SYNC,
        (
            (
                "",
                "        accelerator.backward(loss)\n",
                "        accelerator.is_main_process and accelerator.wait_for_everyone()  # waits\n        accelerator.backward(loss)\n",
            ),
            ("", DISTRIBUTED, DISTRIBUTED[:-1] + "  # cause\n"),
        ),
        "mismatch|ended by a library|by a library in C",
    ),
    "sync_dist on rank 0 only": Mistake(
        LIGHTNING,
        (
            (
                "",
                '        self.log("valid_loss", loss)\n',
                '        if self.global_rank == 0:\n            self.log("valid_loss", loss, sync_dist=True)\n',
            ),
            (
                "",
                "    trainer.fit(model, train_dataloaders=train_data, val_dataloaders=val_data)\n",
                "    trainer.fit(model, train_dataloaders=train_data, val_dataloaders=val_data)  # cause\n",
            ),
        ),
        "rank 1|mismatch",
    ),
    "lock taken twice in a metric": Mistake(
        TRAINER,
        (
            (
                "",
                "            sequential = list(range(len(dataset)))\n",
                f'            lock = __import__("threading").Lock()\n            {RANK} and [lock.acquire(), lock.acquire()]  # cause\n            sequential = list(range(len(dataset)))\n',
            ),
            (
                "",
                '        p = trainer.predict(dataset)\n        logger.info(p.metrics)\n        if p.metrics["test_success"] is not True:\n            logger.error(p.metrics)\n            exit(1)\n\n        trainer.args',
                '        p = trainer.predict(dataset)  # waits\n        logger.info(p.metrics)\n        if p.metrics["test_success"] is not True:\n            logger.error(p.metrics)\n            exit(1)\n\n        trainer.args',
            ),
        ),
        "rank 1 never reached",
    ),
    "stopped by a signal": Mistake(
        NODES,
        (
            ("", "        output = self.model(source)\n", "        output = self.model(source)  # waits\n"),
            (
                "",
                "        self.optimizer.step()\n",
                f"        self.optimizer.step()\n        {RANK} and [{SLEEP.replace('600', '2')}, os.kill(os.getpid(), 19)]  # cause\n",
            ),
        ),
        "rank 1 is stopped by a signal",
    ),
    "sleep on one rank": Mistake(
        TENSOR,
        (
            ("", "    optimizer.step()\n", f"    optimizer.step()\n    _rank and i == 3 and {SLEEP}  # cause\n"),
            ("", "output.sum().item())\n", "output.sum().item())  # waits\n"),
        ),
        "rank 1 never reached",
    ),
}
HOWS = ("launch", "two hosts")


def write_mistake(mistake: Mistake, sources: Path, folder: Path) -> dict[str, list[str]]:
    """Copy the script and apply the edits. Return the lines that end in each mark, as `train.py:31`."""
    script = SCRIPTS[mistake.script]
    prepare_script(script, sources, folder)
    marked_lines: dict[str, list[str]] = {"cause": [], "waits": []}
    for file, before, after in mistake.edits:
        path = folder / (file or script.file)
        text = path.read_text()
        assert text.count(before) >= 1, (
            f"{path.name} does not contain {before!r}: check out the commit that this benchmark was written for"
        )
        path.write_text(text.replace(before, after, 1))
    for name in {file or script.file for file, _, _ in mistake.edits}:
        for number, line in enumerate((folder / name).read_text().splitlines(), 1):
            for mark in marked_lines:
                if line.endswith(f"# {mark}"):
                    marked_lines[mark].append(f"{name}:{number}")
    return marked_lines


def run_until_message(script: str, folder: Path, hosts: Hosts | None) -> str:
    """Run the script until a message explains a failure or a hang, at most `LIMIT_SECONDS`. Return the messages."""
    file, arguments = SCRIPTS[script].file, SCRIPTS[script].arguments
    launch = [sys.executable, "-m", "everyrank", "launch", "--processes", "2", "--timeout", str(TIMEOUT_SECONDS)]
    variables = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}
    if hosts is not None:
        variables["GLOO_SOCKET_IFNAME"] = "eth0"
        launch += ["--nodes", "2", "--rendezvous", f"{hosts.addresses[0]}:{free_port()}", "--logs", "logs"]
        processes = [
            hosts.start(node, [*launch, "--node-rank", str(node), file, *arguments], folder, **variables)
            for node in (0, 1)
        ]
    else:
        environment = {**os.environ, **variables, "GLOO_SOCKET_IFNAME": "lo"}
        command = [*launch, "--grace", "0", file, *arguments]
        pipe = subprocess.PIPE
        options = {"cwd": folder, "env": environment, "text": True, "start_new_session": True}
        processes = [subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=pipe, **options)]  # type: ignore
    outputs = [list[str]() for _ in processes]
    readers = [
        threading.Thread(target=lambda process=process, output=output: output.extend(process.stderr), daemon=True)
        for process, output in zip(processes, outputs, strict=True)
    ]
    for process in processes if hosts is not None else []:
        threading.Thread(target=lambda process=process: process.stdout.read(), daemon=True).start()
    for reader in readers:
        reader.start()
    deadline = time.monotonic() + LIMIT_SECONDS
    while time.monotonic() < deadline and any(process.poll() is None for process in processes):
        if any("(--timeout)" in line for output in outputs for line in output):
            time.sleep(1.0)
            break
        time.sleep(0.2)
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
    for process in processes:
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    for reader in readers:
        reader.join(5)
    return "\n".join("".join(output) for output in outputs)


def check_message(mistake: Mistake, marked_lines: dict[str, list[str]], text: str) -> dict[str, Any]:
    """Return the message, and whether it names the cause, the rank at fault, and the lines of the script."""
    messages = [line for line in text.splitlines() if line.startswith("everyrank: ") and re.search(r"\brank \d", line)]
    with_cause = [message for message in messages if re.search(mistake.phrase, message)]
    message = (with_cause or messages or [""])[-1]
    return {
        "cause": bool(with_cause),
        "rank": bool(re.search(rf"\branks? ([\d, and]+ )?{mistake.rank}\b", message)),
        "line": all(
            any(re.search(rf"{re.escape(location)}\b", message) for location in locations)
            for locations in marked_lines.values()
            if locations
        ),
        "message": re.sub(r"/tmp/\S+/", "", message),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--how", nargs="+", choices=HOWS, default=list(HOWS))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    existing = json.loads(args.json.read_text())["rows"] if args.json and args.json.exists() else []
    rows: dict[tuple[str, str], dict[str, Any]] = {(row["name"], row["how"]): row for row in existing}
    hosts = Hosts(2) if "two hosts" in args.how else None
    try:
        for name, mistake in [*FAILURES.items(), *HANGS.items()]:
            if args.names and not any(fragment in name for fragment in args.names):
                continue
            for how in args.how:
                with tempfile.TemporaryDirectory() as folder:
                    marked_lines = write_mistake(mistake, args.sources, Path(folder))
                    text = run_until_message(mistake.script, Path(folder), hosts if how == "two hosts" else None)
                row = {"name": name, "kind": "fails" if name in FAILURES else "hangs", "script": mistake.script}
                rows[name, how] = row | {"how": how, **check_message(mistake, marked_lines, text)}
                is_named = all(rows[name, how][key] for key in ("cause", "rank", "line"))
                print(f"{'ok' if is_named else 'NOT NAMED'}: {name}, {how}: {rows[name, how]['message']}", flush=True)
                if not is_named:
                    print(f"   expected {mistake.phrase!r} {marked_lines}\n{text[-3000:]}", flush=True)
                if args.json:
                    args.json.write_text(
                        json.dumps({"rows": list(rows.values()), "provenance": provenance()}, indent=1) + "\n"
                    )
    finally:
        if hosts is not None:
            hosts.close()


if __name__ == "__main__":
    main()
