"""An audited script reads back its changes to files, and the user's files do not change."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from everyrank.audit.watch.recorder import ENVIRONMENT, Settings

INJECT = Path(__file__).parents[2] / "src" / "everyrank" / "audit" / "watch" / "inject"

FILE_OPERATIONS = {
    "write": """
        Path("new.txt").write_text("new"); assert Path("new.txt").read_text() == "new"
        assert "new.txt" in os.listdir(".") and "new.txt" in {e.name for e in os.scandir(".")}
    """,
    "overwrite": 'open("kept.txt", "w").write("other"); assert open("kept.txt").read() == "other"',
    "append": 'open("kept.txt", "a").write("more"); assert open("kept.txt").read() == "keptmore"',
    "write in the middle": """
        with open("kept.txt", "r+") as f: f.seek(1); f.write("XX")
        assert open("kept.txt").read() == "kXXt"
    """,
    "exclusive creation": """
        try: open("kept.txt", "x"); raise SystemExit("it is there")
        except FileExistsError: pass
        open("fresh.txt", "x").close()
        try: open("fresh.txt", "x"); raise SystemExit("it is there")
        except FileExistsError: pass
    """,
    "file descriptors": """
        fd = os.open("kept.txt", os.O_WRONLY | os.O_APPEND); os.write(fd, b"!"); os.close(fd)
        assert open("kept.txt").read() == "kept!"
        fd = os.open("low.txt", os.O_CREAT | os.O_EXCL | os.O_WRONLY); os.write(fd, b"low"); os.close(fd)
        assert Path("low.txt").read_text() == "low"
        folder = os.open("folder", os.O_RDONLY)
        fd = os.open("beside.txt", os.O_CREAT | os.O_WRONLY, dir_fd=folder); os.close(fd)
        os.unlink("inner.txt", dir_fd=folder); os.close(folder)
        assert sorted(os.listdir("folder")) == ["beside.txt", "deep"]
    """,
    "FileIO": """
        import io
        io.FileIO("kept.txt", "w").write(b"raw"); assert open("kept.txt").read() == "raw"
        assert isinstance(open("kept.txt", "rb").raw, io.FileIO)
        try: io.FileIO("folder/inner.txt", "x"); raise SystemExit("it is there")
        except FileExistsError: pass
    """,
    "remove": """
        os.remove("kept.txt"); assert not os.path.exists("kept.txt") and "kept.txt" not in os.listdir(".")
        Path("kept.txt").write_text("again"); assert Path("kept.txt").read_text() == "again"
    """,
    "rename": """
        os.rename("kept.txt", "moved.txt"); assert Path("moved.txt").read_text() == "kept"
        assert not Path("kept.txt").exists()
        os.replace("moved.txt", "folder/inner.txt"); assert Path("folder/inner.txt").read_text() == "kept"
    """,
    "rename a folder": """
        Path("folder/added.txt").write_text("added"); os.rename("folder", "other")
        assert Path("other/inner.txt").read_text() == "inner" and Path("other/added.txt").read_text() == "added"
        assert not Path("folder").exists() and Path("other/deep/deeper.txt").read_text() == "deeper"
    """,
    "rename a folder from which files were removed": """
        os.remove("folder/inner.txt"); shutil.rmtree("folder/deep"); Path("folder/deep").write_text("now a file")
        os.rename("folder", "other"); assert os.listdir("other") == ["deep"]
        assert Path("other/deep").read_text() == "now a file"
    """,
    "list folders by bytes": """
        Path("folder/new.txt").touch()
        assert {e.name for e in os.scandir(b"folder")} == {b"inner.txt", b"deep", b"new.txt"}
        assert sorted(name for _, _, names in os.walk(b"folder") for name in names)[0] == b"deeper.txt"
        assert os.listxattr() == os.listxattr(".")
    """,
    "rename a file over an empty folder": """
        os.mkdir("empty")
        try: os.rename("kept.txt", "empty"); raise SystemExit("it is a folder")
        except IsADirectoryError: pass
        assert Path("kept.txt").exists() and os.path.isdir("empty")
    """,
    "move a folder from another disk": """
        import tempfile
        made = tempfile.mkdtemp(dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
        Path(made, "x").write_text("x"); shutil.move(made, "moved")
        assert Path("moved/x").read_text() == "x" and not os.path.exists(made)
    """,
    "parent of the target of a symlink": """
        os.symlink("folder/deep", "down"); Path("down/../inner.txt").write_text("up")
        assert Path("folder/inner.txt").read_text() == "up" and not Path("inner.txt").exists()
    """,
    "list the root folder": """
        Path("new.txt").touch(); assert {e.path for e in os.scandir("/")} == {f"/{name}" for name in os.listdir("/")}
    """,
    "makedirs": """
        os.makedirs("a/b/c"); os.makedirs("a/b/c", exist_ok=True); Path("a/b/c/x").touch()
        assert os.path.isfile("a/b/c/x")
        try: os.mkdir("folder"); raise SystemExit("it is there")
        except FileExistsError: pass
        try: os.rmdir("folder"); raise SystemExit("it is not empty")
        except OSError: pass
    """,
    "rmtree": """
        shutil.rmtree("folder"); assert not os.path.exists("folder") and not Path("folder/inner.txt").exists()
        os.makedirs("folder"); assert os.listdir("folder") == []; Path("folder/inner.txt").write_text("mine")
        assert Path("folder/inner.txt").read_text() == "mine" and not Path("folder/deep").exists()
    """,
    "hard links and symlinks": """
        Path("last.txt").write_text("last"); os.link("last.txt", "best.txt"); os.symlink("last.txt", "latest")
        assert Path("best.txt").read_text() == "last" and Path("latest").read_text() == "last"
        assert os.path.islink("latest")
        assert os.readlink("latest") == "last.txt"
        os.link("kept.txt", "second.txt"); open("second.txt", "a").write("!")
        assert Path("second.txt").read_text() == "kept!"
        Path("absolute").symlink_to(Path("kept.txt").absolute()); assert Path("absolute").read_text() == "kept"
        os.remove("link.txt"); os.symlink("last.txt", "link.txt"); assert Path("link.txt").read_text() == "last"
    """,
    "write through a symlink": """
        open("link.txt", "w").write("x"); assert open("link.txt").read() == open("kept.txt").read() == "x"
        os.truncate("link.txt", 0); assert os.path.islink("link.txt") and os.stat("link.txt").st_size == 0
    """,
    "write through a new symlink to a file": """
        os.symlink("kept.txt", "latest"); open("latest", "a").write("x"); os.chmod("latest", 0o600)
        assert Path("kept.txt").read_text() == "keptx" and os.path.islink("latest")
        os.symlink("latest", "second"); Path("second").write_text("y"); assert Path("kept.txt").read_text() == "y"
        os.symlink(os.path.abspath("folder/inner.txt"), "next"); os.replace("next", "latest")
        assert os.readlink("latest") == os.path.abspath("folder/inner.txt") and Path("latest").read_text() == "inner"
        Path("folder/inner.txt").write_text("z"); assert Path("latest").read_text() == "z"
    """,
    "write through a new symlink to a folder": """
        os.symlink("folder", "latest"); Path("latest/inner.txt").write_text("x"); Path("latest/new.txt").touch()
        assert Path("folder/inner.txt").read_text() == "x" and os.readlink("latest") == "folder"
        assert sorted(os.listdir("latest")) == sorted(os.listdir("linked")) == ["deep", "inner.txt", "new.txt"]
        assert {entry.name for entry in os.scandir() if entry.is_dir()} == {"folder", "latest", "linked"}
        os.remove("latest/inner.txt"); assert not os.path.exists("folder/inner.txt")
        os.symlink("folder/deep", "next"); os.replace("next", "latest"); assert os.listdir("latest") == ["deeper.txt"]
    """,
    "write through a symlink to a folder": """
        Path("linked/inner.txt").write_text("x"); assert Path("folder/inner.txt").read_text() == "x"
    """,
    "copies": """
        shutil.copy("kept.txt", "one.txt"); shutil.copy2("kept.txt", "two.txt"); shutil.copytree("folder", "three")
        assert Path("three/deep/deeper.txt").read_text() == "deeper" and Path("two.txt").read_text() == "kept"
        shutil.copy2("two.txt", "kept.txt"); shutil.move("two.txt", "folder"); assert Path("folder/two.txt").exists()
        shutil.move("folder", "gone"); assert Path("gone/two.txt").exists() and not Path("folder").exists()
    """,
    "mode, times and length": """
        os.chmod("kept.txt", 0o600); os.utime("kept.txt", (1, 1)); os.truncate("kept.txt", 2)
        assert Path("kept.txt").read_text() == "ke"
        Path("t.txt").touch(); os.chmod("t.txt", 0o640); assert os.stat("t.txt").st_mode & 0o777 == 0o640
    """,
    "change of working directory": """
        os.makedirs("run"); os.chdir("run"); Path("log.txt").write_text("log")
        assert os.path.exists("../kept.txt")
        assert Path.cwd().name == "run" and os.getcwd().endswith("run"); os.chdir("..")
        assert Path("run/log.txt").exists()
    """,
    "temporary file": """
        import tempfile
        with tempfile.NamedTemporaryFile(dir=".", delete=False) as f: f.write(b"x")
        assert os.path.exists(f.name); os.replace(f.name, "kept.txt"); assert Path("kept.txt").read_text() == "x"
    """,
    "threads": """
        import threading
        def append(n): [open(f"t{n}.txt", "a").write("x") for _ in range(50)]
        threads = [threading.Thread(target=append, args=(n,)) for n in range(4)]
        [t.start() for t in threads]; [t.join() for t in threads]
        assert all(len(Path(f"t{n}.txt").read_text()) == 50 for n in range(4))
    """,
    "compressed files": """
        import bz2, gzip, lzma, zipfile
        for module in (bz2, gzip, lzma): module.open("z." + module.__name__, "wb").write(b"x")
        zipfile.ZipFile("z.zip", "w").writestr("a", "b"); assert zipfile.ZipFile("z.zip").read("a") == b"b"
    """,
    "logging": """
        import logging
        logging.basicConfig(filename="kept.txt"); logging.error("lost"); assert "lost" in Path("kept.txt").read_text()
    """,
    "functions imported by name": """
        from os import makedirs, remove; from shutil import copyfile
        makedirs("n/m"); remove("kept.txt"); copyfile("folder/inner.txt", "kept.txt")
        assert Path("kept.txt").read_text() == "inner"
    """,
    "subprocess": """
        import subprocess, sys
        code = "for name in ('child.txt', 'kept.txt'): open(name, 'w').write('c')"
        subprocess.run([sys.executable, "-c", code], check=True)
        assert Path("child.txt").read_text() == "c" and Path("kept.txt").read_text() == "c"
    """,
    "fork": """
        if os.fork() == 0:
            Path("forked.txt").write_text("f"); os._exit(0)
        os.wait(); assert Path("forked.txt").read_text() == "f"
    """,
    "walk and glob": """
        import glob
        Path("folder/deep/more.txt").write_text("m")
        assert sorted(glob.glob("folder/**/*.txt", recursive=True)) == [
            "folder/deep/deeper.txt", "folder/deep/more.txt", "folder/inner.txt"]
        assert sorted(p.name for p in Path("folder").rglob("*.txt")) == ["deeper.txt", "inner.txt", "more.txt"]
        assert [sorted(files) for _, _, files in os.walk("folder")] == [["inner.txt"], ["deeper.txt", "more.txt"]]
    """,
    "scandir": """
        Path("folder/new.txt").write_text("new")
        names = ["folder/deep", "folder/inner.txt", "folder/new.txt"]
        assert sorted(e.path for e in os.scandir("folder")) == names
        assert sorted(e.path for e in os.scandir(b"folder")) == [name.encode() for name in names]
        assert sorted(e.path for e in os.scandir(Path("folder").absolute())) == [
            str(Path.cwd() / name) for name in names]
        folder = os.open("folder", os.O_RDONLY)
        assert sorted(e.path for e in os.scandir(folder)) == ["deep", "inner.txt", "new.txt"]
        os.close(folder)
        assert sorted(top for top, _, _ in os.walk("folder")) == ["folder", "folder/deep"]
    """,
    "missing files and wrong types": """
        for call in (lambda: open("no/such", "w"), lambda: os.remove("no"), lambda: os.rename("no", "x"),
                     lambda: os.rmdir("no"), lambda: os.listdir("no"), lambda: os.stat("no"),
                     lambda: os.chmod("no", 0)):
            try: call(); raise SystemExit("no error")
            except FileNotFoundError: pass
        for call in (lambda: open("folder", "w"), lambda: os.remove("folder")):
            try: call(); raise SystemExit("no error")
            except IsADirectoryError: pass
        Path("new.txt").write_text("new")
        for call in (lambda: open("kept.txt/x", "w"), lambda: os.mkdir("kept.txt/x"), lambda: open("new.txt/x", "w")):
            try: call(); raise SystemExit("no error")
            except NotADirectoryError: pass
        assert Path("kept.txt").read_text() == "kept"
    """,
    "path through a new folder": """
        os.makedirs("run"); assert Path("run/../kept.txt").read_text() == "kept" and os.path.exists("run/../kept.txt")
        os.chdir("run/.."); assert Path("kept.txt").exists()
    """,
    "rmtree of a folder with a new file": """
        Path("folder/deep/new.txt").touch(); shutil.rmtree("folder"); assert not os.path.exists("folder")
    """,
    "folder renamed to a file": """
        try: os.rename("folder", "kept.txt"); raise SystemExit("no error")
        except NotADirectoryError: assert Path("kept.txt").read_text() == "kept"
    """,
    "folder of a descriptor without the parent": """
        os.makedirs("empty"); fd = os.open("empty", os.O_RDONLY)
        for call in (lambda: os.mkdir("folder/y", dir_fd=fd), lambda: os.chmod("kept.txt", 0o600, dir_fd=fd)):
            try: call(); raise SystemExit("no error")
            except FileNotFoundError: assert not os.path.exists("folder/y")
    """,
    "new symlink to a temporary folder": """
        import tempfile
        made = tempfile.mkdtemp(dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
        Path(made, "x").write_text("x"); os.symlink(made, "data")
        assert Path("data/x").read_text() == "x" and os.listdir("data") == ["x"] and os.path.exists("data/x")
        assert [entry.path for entry in os.scandir("data")] == ["data/x"]
        os.makedirs("data/a/b"); os.replace("data/x", "data/y"); assert Path(made, "y").read_text() == "x"
        os.link("data/y", "data/z"); os.utime("data/z", (5, 5)); assert os.stat(f"{made}/y").st_mtime == 5
        os.remove("data/y"); assert sorted(os.listdir(made)) == ["a", "z"]
        shutil.rmtree(made)
    """,
    "rename and link into the folder of a descriptor": """
        import tempfile
        made = tempfile.mkdtemp(); folder = os.open(made, os.O_RDONLY); Path("a").write_text("a")
        os.link("a", "b.txt", dst_dir_fd=folder); os.rename("a", "c.txt", dst_dir_fd=folder)
        assert sorted(os.listdir(made)) == ["b.txt", "c.txt"] and not Path("b.txt").exists() and not Path("a").exists()
        os.rename("c.txt", "back.txt", src_dir_fd=folder); assert Path("back.txt").read_text() == "a"
        os.close(folder); shutil.rmtree(made)
    """,
    "empty path": """
        os.makedirs("run"); os.chdir("run"); assert not os.path.exists("") and not os.path.isdir("")
        os.mkdir("__pycache__"); assert os.path.isdir("__pycache__")
        for function in (os.remove, os.rmdir, os.makedirs, os.listdir, open):
            try: function(""); raise SystemExit(f"{function} takes the empty path")
            except FileNotFoundError: pass
    """,
    "opener with a descriptor": """
        folder = os.open("folder", os.O_RDONLY)
        def in_folder(path, flags): return os.open(path, flags, dir_fd=folder)
        with open("opened.txt", "w", opener=in_folder) as file: file.write("x")
        assert Path("folder/opened.txt").read_text() == "x" and not os.path.exists("opened.txt")
    """,
    "program in a new folder": """
        import subprocess
        os.makedirs("out/deep"); code = "open('x', 'w').close()"
        subprocess.run([sys.executable, "-c", code], cwd="out", check=True); assert Path("out/x").exists()
        subprocess.run(["/bin/true"], cwd=Path("out/deep"), check=True)
        os.waitpid(os.posix_spawn("/bin/false", ["false"], os.environ), 0)
        assert sys.modules["everyrank.audit.watch.overlay"]._installed[0].commands == {"true", "false"}
    """,
    "programs of a shell": """
        import subprocess
        command = f"A=1 {sys.executable} -c 'print(1); exit()' && cd folder && B=2 ls | sort"
        subprocess.run(command, shell=True, check=True)
        os.system("cd folder; nohup uname > /dev/null 2>&1"); subprocess.run(["bash", "-c", "export A=1\\nwhoami"])
        assert sys.modules["everyrank.audit.watch.overlay"]._installed[0].commands == {"ls", "sort", "uname", "whoami"}
    """,
    "deleted working folder": """
        import tempfile
        kept = os.path.abspath("kept.txt")
        with tempfile.TemporaryDirectory() as made: os.chdir(made)
        open(kept, "w").write("x"); assert Path(kept).read_text() == "x"
        os.remove(kept); assert not os.path.exists(kept)
    """,
    "folder opened for writing from a new folder": """
        os.mkdir("new"); os.chdir("new")
        try: open("../folder", "w"); raise SystemExit("it is a folder")
        except IsADirectoryError: assert Path("../folder/inner.txt").exists()
    """,
    "mode and time of a descriptor": """
        with open("kept.txt") as kept, open("new.txt", "w") as new:
            for file in (kept, new): os.utime(file.fileno(), (5, 5)); os.fchmod(file.fileno(), 0o600)
        assert os.stat("new.txt").st_mtime == 5 and os.stat("new.txt").st_mode & 0o777 == 0o600
    """,
    "time of a renamed file": """
        before = os.stat("kept.txt").st_mtime_ns; os.rename("kept.txt", "moved.txt")
        assert os.stat("moved.txt").st_mtime_ns == before
    """,
    "link to an existing temporary file": """
        import tempfile
        lock = os.path.join(tempfile.mkdtemp(), "lock"); Path(lock).write_text("locked")
        try: os.link("kept.txt", lock); raise SystemExit("no error")
        except FileExistsError: assert Path(lock).read_text() == "locked"
    """,
    "folder in place of a file": """
        os.remove("kept.txt"); os.makedirs("kept.txt/deep")
        assert [e.name for e in os.scandir("kept.txt")] == os.listdir("kept.txt") == ["deep"]
    """,
}

LIBRARIES = {
    "sqlite3": """
        import sqlite3
        db = sqlite3.connect("data.db"); db.execute("create table t (x)"); db.commit(); db.close()
        assert sqlite3.connect("data.db").execute("select count(*) from t").fetchone() == (0,)
        table = "create table t (x)"
        for number, database in enumerate(["file:a.db", "file:b.db?mode=rwc", f"file://{Path.cwd()}/c%20d.db"]):
            db = sqlite3.connect(database=database, uri=True); db.execute(table); db.close()
        assert sqlite3.connect("c d.db").execute("select * from t").fetchall() == []
        assert sqlite3.connect("file:a.db?mode=ro", uri=True).execute("select * from t").fetchall() == []
        for database in (":memory:", "file::memory:", ""):
            sqlite3.connect(database, uri=True).execute(table)
    """,
    "torch": """
        from torch import nn
        def double(x): return 2 * x
        scripted, traced = torch.jit.script(nn.Tanh()), torch.jit.trace(nn.Tanh(), torch.ones(1))
        for number, module in enumerate([scripted, traced, torch.jit.script(double)]):
            module.save(f"{number}.pt"); assert torch.jit.load(f"{number}.pt")(torch.zeros(1)) == 0
        torch.jit.save(scripted, "kept.txt"); assert torch.jit.load("kept.txt")(torch.zeros(1)) == 0
        with torch.profiler.profile() as profiler: torch.ones(1)
        profiler.export_chrome_trace("trace.json"); assert "traceEvents" in Path("trace.json").read_text()
        with torch.package.PackageExporter("package.pt") as package: package.save_text("a", "b", "c")
        assert torch.package.PackageImporter("package.pt").load_text("a", "b") == "c"
        import lmdb
        assert lmdb.open("folder", readonly=True) == "folder" and lmdb.open(path="kept.txt") != "kept.txt"
    """,
    "pyarrow": """
        import pyarrow as pa, pyarrow.parquet as pq, pyarrow.csv, pyarrow.dataset, pyarrow.feather
        table = pa.table({"a": [1, 2]})
        with pa.OSFile("folder/inner.txt") as file: assert file.read() == b"inner"
        with pa.OSFile("new.arrow", "wb") as file, pa.ipc.new_file(file, table.schema) as new: new.write_table(table)
        with pa.memory_map("new.arrow") as file: assert pa.ipc.open_file(file).read_all() == table
        pq.write_table(table, "t.parquet"); assert pq.read_table("t.parquet") == pq.ParquetFile("t.parquet").read()
        with pq.ParquetWriter("w.parquet", table.schema) as new: new.write_table(table)
        assert pq.read_table("w.parquet") == table
        pa.csv.write_csv(table, "t.csv"); assert pa.csv.read_csv("t.csv") == table
        pa.feather.write_feather(table, "t.feather"); assert pa.feather.read_table("t.feather") == table
        pa.dataset.write_dataset(table, "new", format="parquet"); assert pa.dataset.dataset("new").count_rows() == 2
        pa.dataset.write_dataset(table, "folder", format="parquet", existing_data_behavior="overwrite_or_ignore")
    """,
    "tokenizers": """
        import tokenizers
        model = tokenizers.models.WordLevel({"a": 0}, unk_token="a"); tokenizer = tokenizers.Tokenizer(model)
        tokenizer.save("t.json"); assert tokenizers.Tokenizer.from_file("t.json").get_vocab_size() == 1
        os.mkdir("made"); model.save("made", "x"); assert os.listdir("made") == ["x-vocab.json"]
        model.save("folder", "x"); assert os.path.exists("folder/x-vocab.json")
    """,
}
"""Libraries that write in C. They are redirected when the script imports torch."""


def make_project(folder: Path) -> Path:
    """Create and return a folder with a file and a folder of files.

    It also has a symlink to the file and one to the inner folder.
    """
    (folder / "folder" / "deep").mkdir(parents=True)
    (folder / "kept.txt").write_text("kept")
    (folder / "folder" / "inner.txt").write_text("inner")
    (folder / "folder" / "deep" / "deeper.txt").write_text("deeper")
    (folder / "link.txt").symlink_to("kept.txt")
    (folder / "linked").symlink_to("folder")
    return folder


def folder_state(folder: Path) -> dict[str, object]:
    """Return content, mode, modification time and number of hard links of each path in a folder."""
    states: dict[str, object] = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        content = str(path.readlink()) if path.is_symlink() else path.read_bytes() if path.is_file() else b""
        states[str(path)] = content, status.st_mode, status.st_mtime_ns, status.st_nlink
    return states


def run_in_project(tmp_path: Path, code: str, python_path: Path = INJECT, **files: str) -> None:
    """Run a script under the overlay in a project with these modules, and check that no file of the project changes."""
    project_folder = make_project(tmp_path / "project")
    (tmp_path / "records").mkdir()
    for name, text in files.items():
        (project_folder / f"{name}.py").write_text(text)
    script = project_folder / "script.py"
    script.write_text(f"import os, shutil, sys\nfrom pathlib import Path\n{code}\nprint('done')\n")
    state_before = folder_state(project_folder)
    environment = {
        **os.environ,
        ENVIRONMENT: Settings(str(tmp_path / "records"), main=str(script)).to_json(),
        "PYTHONPATH": f"{INJECT}{os.pathsep}{python_path}",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    completed = subprocess.run(
        [sys.executable, script.name], cwd=project_folder, env=environment, capture_output=True, text=True
    )
    assert completed.stdout.endswith("done\n"), completed.stderr
    assert folder_state(project_folder) == state_before


@pytest.mark.parametrize("operation", FILE_OPERATIONS)
def test_script_sees_its_changes_and_user_files_stay_the_same(tmp_path: Path, operation: str) -> None:
    run_in_project(tmp_path, textwrap.dedent(FILE_OPERATIONS[operation]))


def test_error_in_the_users_sitecustomize_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_bytes("# coding: latin-1\nraise ValueError('é')\n".encode("latin-1"))
    run_in_project(tmp_path, textwrap.dedent(FILE_OPERATIONS["write"]), tmp_path)


@pytest.mark.integration
def test_files_of_libraries_are_redirected(tmp_path: Path) -> None:
    """One script for all installed libraries, because it imports torch. The module `lmdb` is a fake."""
    installed = [name for name in LIBRARIES if importlib.util.find_spec(name) is not None]
    code = "import torch\n" + "\n".join(textwrap.dedent(LIBRARIES[name]) for name in installed)
    lmdb = "def open(path, map_size=0, subdir=True, readonly=False): return path"
    run_in_project(tmp_path, code, INJECT.parents[3], lmdb=lmdb)


def test_folder_created_in_the_temporary_directory_is_redirected(tmp_path: Path) -> None:
    """TMPDIR is the working directory of the script. A folder that it creates there is redirected with its files."""
    folder = make_project(tmp_path / "project")
    (tmp_path / "records").mkdir()
    script = tmp_path / "scripts" / "script.py"
    script.parent.mkdir()
    script.write_text(
        "import os, tempfile\nos.makedirs('out/deep')\nopen('out/deep/new.txt', 'w').write('new')\n"
        "assert open('out/deep/new.txt').read() == 'new' and os.listdir('out') == ['deep']\n"
        "assert os.path.isdir(tempfile.mkdtemp(dir='out/deep'))\n"
        "open('new.txt', 'w').close(); os.remove('kept.txt')\n"
        "assert 'new.txt' in os.listdir('.') and 'kept.txt' not in os.listdir('.')\n"
        "open(os.path.join(tempfile.mkdtemp(), 'a.txt'), 'w').write('a')\nprint('done')\n"
    )
    environment = {
        **os.environ,
        ENVIRONMENT: Settings(str(tmp_path / "records"), main=str(script)).to_json(),
        "PYTHONPATH": str(INJECT),
        "TMPDIR": str(folder),
    }
    state_before = folder_state(folder)
    completed = subprocess.run([sys.executable, script], cwd=folder, env=environment, capture_output=True, text=True)
    assert completed.stdout == "done\n", completed.stderr
    assert {
        name for name in folder_state(folder) if not Path(name).relative_to(folder).parts[0].startswith("tmp")
    } == set(state_before)


def test_settings_contain_the_keys_that_sitecustomize_reads() -> None:
    settings = json.loads(Settings("folder", main="main.py").to_json())
    assert {"folder", "main", "keep_files"} <= settings.keys()
