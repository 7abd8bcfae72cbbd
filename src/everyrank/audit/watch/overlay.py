"""Redirects the files that an audited script writes into the audit's folder, so that the user's files do not change.

Its folder `files` holds two trees. `written/home/user/out/log.txt` is the script's version of /home/user/out/log.txt,
and `removed/home/user/out/old.pt` marks a file that the script has removed. The script sees both trees on top of the
real files: it can read its own files under their original names, and cannot see files that it has removed.

Python's own functions for files are replaced when the interpreter starts, before the script can import any of them
under another name: open, os.open, mkdir, remove, rename, link, symlink, truncate, and so on. This file imports only the
standard library, because every Python process of the script loads it first. `saving.py` redirects libraries that write
in C, C++ or Rust. Temporary folders, caches and devices are not redirected.
"""

# sys._getframe is private.
# pyright: reportPrivateUsage=false
from __future__ import annotations

import builtins
import errno
import functools
import io
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["Overlay", "install_overlay"]

_WRITES = set("wax+")
_WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_SYSTEM_FOLDERS = ("/dev/", "/proc/", "/sys/")
_MAX_LINKS = 40  # the number of symlinks that Linux follows in one path
_REAL = {name: getattr(os, name) for name in dir(os) if callable(getattr(os, name))}
_REAL_OPEN = builtins.open
_installed: list[Overlay] = []


class Overlay:
    """The script's view of the file system: the real files, plus its writes, minus its removals.

    folder  the audit's folder, which all ranks of a script share. Its folder `files/written` is "the tree" below
    main    the script, whose folder is redirected even if it is inside a temporary folder
    """

    def __init__(self, folder: str, main: str) -> None:
        # do not import `tempfile`: it would copy `open` before it is replaced
        temporary = [os.environ[name] for name in ("TMPDIR", "TEMP", "TMP") if os.environ.get(name)]
        self.audit_folder = os.path.realpath(folder)
        files_folder = f"{self.audit_folder}/files"
        self.written, self.removed = f"{files_folder}/written", f"{files_folder}/removed"
        self.start_folder = self.as_script_sees(os.path.realpath(os.getcwd()))  # a program may start in a new folder
        main_folder = os.path.dirname(main)
        self.main_folder = os.path.realpath(main_folder) if main_folder else ""
        # is_busy: this thread is inside the overlay, whose own calls are not redirected
        self.thread_state = threading.local()
        direct_folders = [*temporary, "/tmp", "/var/tmp", "/dev", "/proc", "/sys", os.path.expanduser("~/.cache")]
        direct_folders += [
            os.environ[name] for name in ("TORCH_HOME", "HF_HOME", "XDG_CACHE_HOME") if os.environ.get(name)
        ]
        self.direct_folders = tuple(os.path.realpath(path) + os.sep for path in direct_folders)
        self.num_initial_direct = len(self.direct_folders)  # later ones are folders that `tempfile` has created
        self.commands: set[str] = set()  # programs other than Python that the script has started

    # --- paths

    def script_path(self, path: Any, dir_fd: int | None = None, *, follows: bool = True) -> str | None:
        """The absolute path from the script's point of view; None for descriptors and paths that are not redirected.

        `follows`: if the path itself is a symlink, return its target.
        """
        absolute, _, is_direct = self._resolved(path, dir_fd, follows)
        return None if is_direct else absolute

    def _resolved(self, path: Any, dir_fd: int | None, follows: bool) -> tuple[str | None, bool, bool]:
        """Return the absolute path, whether a new link leads to it, and whether it is direct.

        A new link is a symlink that the script has created. A direct path is not redirected (`_is_direct`). The path is
        None for descriptors, system folders, the empty path, calls by the overlay itself, and unresolvable paths.
        """
        if getattr(self.thread_state, "is_busy", False) or not isinstance(path, str | bytes | os.PathLike):
            return None, False, False
        self.thread_state.is_busy = True
        try:
            name = os.fsdecode(path)
            if not name:  # the empty path is an error, not the working folder
                return None, False, False
            if dir_fd is not None and not os.path.isabs(name):
                name = os.path.join(self._path_of(dir_fd), name)
            # an absolute path needs no working folder, which may have been deleted
            absolute = self.as_script_sees(name if os.path.isabs(name) else os.path.join(self.working_folder(), name))
            # before links are resolved, because /dev/stdout may be a symlink to a file
            if "\0" in absolute or absolute.startswith(_SYSTEM_FOLDERS):
                return None, False, False
            absolute, is_through_new_link = self._without_links(absolute, follows)
            return absolute, is_through_new_link, self._is_direct(absolute)
        except (OSError, ValueError):
            return None, False, False
        finally:
            self.thread_state.is_busy = False

    def _without_links(self, absolute: str, follows: bool) -> tuple[str, bool]:
        """Resolve symlinks as the script sees them. Also return whether the script has created one of them."""
        resolved, remaining = "", absolute.split(os.sep)[:0:-1]
        is_through_new_link, num_links = False, 0
        while remaining:
            name = remaining.pop()
            if name == "..":
                resolved = os.path.dirname(resolved)
            elif name not in ("", os.curdir):
                path = f"{resolved}{os.sep}{name}"
                link = self._link_at(path) if remaining or follows else ""
                num_links += bool(link)
                if not link or num_links > _MAX_LINKS:
                    resolved = path
                    continue
                is_through_new_link |= link != path
                target = _REAL["readlink"](link)
                resolved = "" if os.path.isabs(target) else resolved
                remaining += target.split(os.sep)[::-1]
        return resolved or os.sep, is_through_new_link

    def _link_at(self, path: str) -> str:
        """Return the location of the symlink at `path` in the script's view: in the tree, or `path` itself.

        "" if there is no symlink.
        """
        mode = _mode(self.written + path)
        if mode:
            return self.written + path if stat.S_ISLNK(mode) else ""
        return path if stat.S_ISLNK(_mode(path)) and not self.is_removed(path) else ""

    def as_script_sees(self, path: str) -> str:
        """Convert a path in the tree back to the script's own path. Other paths stay as they are."""
        return (path[len(self.written) :] or "/") if path.startswith(self.written) else path

    def working_folder(self) -> str:
        """The working folder as the script sees it."""
        return self.as_script_sees(_REAL["getcwd"]())

    def _is_inside_tree(self) -> bool:
        """Whether the working folder is one that the script has created, so that relative paths begin in the tree."""
        try:
            return _REAL["getcwd"]().startswith(self.written)
        except FileNotFoundError:  # the working folder has been deleted
            return False

    def _path_of(self, descriptor: int) -> str:
        return self.as_script_sees(_real_path_of(descriptor))

    def is_of_user(self, descriptor: int) -> bool:
        """Whether a descriptor is of a user's file or folder, and not of the script's version of it."""
        try:
            path = _real_path_of(descriptor)
        except OSError:
            return False
        return os.path.isabs(path) and not path.startswith(self.written) and self.script_path(path) is not None

    def _is_direct(self, path: str) -> bool:
        """Whether the script reads and writes a path directly, as in temporary folders, caches and devices.

        The folder of the script and the folder where it was started are redirected even inside temporary folders.
        """
        if "__pycache__" in path and not _exists(self.written + path.partition("/__pycache__")[0]):
            return True
        if (path + os.sep).startswith(self.audit_folder + os.sep):
            return True
        if not (path + os.sep).startswith(self.direct_folders):
            return False
        if any((path + os.sep).startswith(folder) for folder in self.direct_folders[self.num_initial_direct :]):
            return True
        if self.start_folder in (path, os.path.dirname(path)) or self._is_in_created_folder(path):
            return False
        projects = [f for f in (self.start_folder, self.main_folder) if f and f + os.sep not in self.direct_folders]
        return not any((path + os.sep).startswith(folder + os.sep) for folder in projects)

    def _is_in_created_folder(self, path: str) -> bool:
        """Whether a path is in a folder that the script has created in its start folder, which may be /tmp itself."""
        if not path.startswith(self.start_folder + os.sep):
            return False
        top = path[len(self.start_folder) + 1 :].partition(os.sep)[0]
        return _exists(f"{self.written}{self.start_folder}{os.sep}{top}")

    def is_removed(self, path: str) -> bool:
        """Whether the script has removed this file, or a folder around it."""
        if not _exists(self.removed):
            return False
        while len(path) > 1:
            if _exists(f"{self.removed}{path}/.removed"):
                return True
            path = os.path.dirname(path)
        return False

    def mark_removed(self, path: str) -> None:
        """Mark the real file or folder as removed."""
        folder = f"{self.removed}{path}"
        _make_folders(folder)
        _REAL["close"](_REAL["open"](f"{folder}/.removed", os.O_CREAT | os.O_WRONLY))

    def _direct_path(self, path: Any, absolute: str, is_through_new_link: bool) -> Any:
        """Return the path of a file that is not redirected: absolute if a link or folder in the tree leads to it."""
        has_dotdot = os.pardir in os.fsdecode(path).split(os.sep)  # in `x/..`, x may exist only in the tree
        if not is_through_new_link and not self._is_inside_tree() and not has_dotdot:
            return path
        return os.fsencode(absolute) if isinstance(path, bytes) else absolute

    def path_to_read(self, path: Any, dir_fd: int | None = None, *, follows: bool = True) -> Any:
        """The path to read: in the tree if the script has written or removed the file, else the real path."""
        absolute, is_through_new_link, is_direct = self._resolved(path, dir_fd, follows)
        if absolute is None:
            return path
        if is_direct:
            return self._direct_path(path, absolute, is_through_new_link)
        self.thread_state.is_busy = True
        try:
            new_path, is_removed = self.written + absolute, self.is_removed(absolute)
            if not is_removed and (
                not _exists(new_path) or (stat.S_ISDIR(_mode(absolute)) and stat.S_ISDIR(_mode(new_path)))
            ):
                # the real path, also of a folder in both places: listdir and scandir merge their entries
                has_dotdot = os.pardir in os.fsdecode(path).split(os.sep)  # in `x/..`, x may exist only in the tree
                if not self._is_inside_tree() and not is_through_new_link and not has_dotdot:
                    return path
                new_path = absolute
            return os.fsencode(new_path) if isinstance(path, bytes) else new_path
        finally:
            self.thread_state.is_busy = False

    def exists_for_script(self, absolute: str) -> bool:
        """Whether this absolute path exists from the script's point of view."""
        return _exists(self.written + absolute) or (_exists(absolute) and not self.is_removed(absolute))

    def path_to_write(
        self, path: Any, dir_fd: int | None = None, *, keeps_content: bool = False, follows: bool = True
    ) -> Any:
        """The path to write, in the tree. With `keeps_content`, the old content is copied there first."""
        absolute, is_through_new_link, is_direct = self._resolved(path, dir_fd, follows)
        if absolute is None:
            return path
        if is_direct:
            return self._direct_path(path, absolute, is_through_new_link)
        self.thread_state.is_busy = True
        try:
            written_path, parent = self.written + absolute, os.path.dirname(absolute)
            is_parent_in_tree = self.is_removed(parent) or _exists(self.written + parent)
            if not stat.S_ISDIR(_mode(self.written + parent if is_parent_in_tree else parent)):
                return written_path if is_parent_in_tree else path  # opening it raises the expected error
            if stat.S_ISDIR(_mode(absolute)) and not self.is_removed(absolute):
                return self._direct_path(path, absolute, is_through_new_link)  # opening it raises the expected error
            _make_folders(os.path.dirname(written_path))
            if keeps_content and not _exists(written_path) and _exists(absolute) and not self.is_removed(absolute):
                _copy(absolute, written_path)
            return os.fsencode(written_path) if isinstance(path, bytes) else written_path
        finally:
            self.thread_state.is_busy = False

    def folder_to_write(self, path: Any) -> Any:
        """Return the folder in the tree for a library that takes a folder and names the files itself."""
        absolute = self.script_path(path)
        if absolute is None or not stat.S_ISDIR(_mode(absolute)) or self.is_removed(absolute):
            return self.path_to_write(path)
        _make_folders(self.written + absolute)
        return os.fsencode(self.written + absolute) if isinstance(path, bytes) else self.written + absolute

    def entries_of(self, absolute: str) -> list[tuple[str, str]]:
        """(name, path) of each entry that the script sees in a folder. Raises OSError if the folder does not exist."""
        written_path, names = self.written + absolute, dict[str, str]()
        is_real = _exists(absolute) and not self.is_removed(absolute)
        if not is_real and not _exists(written_path):
            _REAL["listdir"](written_path)  # raises
        for folder in ([absolute] if is_real else []) + ([written_path] if _exists(written_path) else []):
            for name in _REAL["listdir"](folder):
                path = os.path.join(folder, name)
                if name in names and stat.S_ISDIR(_mode(names[name])) and stat.S_ISDIR(_mode(path)):
                    continue  # keep the real folder, as `path_to_read` does: scandir and stat have the same inode
                if folder == written_path or not self.is_removed(f"{absolute}/{name}"):
                    names[name] = path
        return list(names.items())


def _real_path_of(descriptor: int) -> str:
    if sys.platform == "darwin":
        import fcntl

        return fcntl.fcntl(descriptor, 50, b"\0" * 1024).rstrip(b"\0").decode()  # F_GETPATH
    return _REAL["readlink"](f"/proc/self/fd/{descriptor}")


def _exists(path: str) -> bool:
    try:
        _REAL["lstat"](path)
    except (OSError, ValueError):
        return False
    return True


def _make_folders(path: str) -> None:
    if not _exists(path):
        _make_folders(os.path.dirname(path))
        try:
            _REAL["mkdir"](path)
        except FileExistsError:  # another rank was faster
            pass


def _mode(path: str) -> int:
    """The mode of a file, folder or symlink; 0 if there is none."""
    try:
        return _REAL["lstat"](path).st_mode
    except (OSError, ValueError):
        return 0


def _copy(source: str, target: str) -> None:
    """Copy a file, a link, or a folder with its content."""
    status = _REAL["lstat"](source)
    mode = status.st_mode
    if stat.S_ISLNK(mode):
        _REAL["symlink"](_REAL["readlink"](source), target)
    elif stat.S_ISDIR(mode):
        _REAL["mkdir"](target)
        for name in _REAL["listdir"](source):
            _copy(f"{source}/{name}", f"{target}/{name}")
    elif stat.S_ISREG(mode):
        with _REAL_OPEN(source, "rb") as before, _REAL_OPEN(target, "wb") as after:
            while chunk := before.read(1 << 20):
                after.write(chunk)
        _REAL["chmod"](target, stat.S_IMODE(mode) | stat.S_IWUSR)
        _REAL["utime"](target, ns=(status.st_atime_ns, status.st_mtime_ns))


def install_overlay(folder: str, main: str) -> Overlay:
    """Replace Python's functions for files, once in each process."""
    if _installed:
        return _installed[0]
    overlay = Overlay(folder, main)
    _installed.append(overlay)
    _redirect_open(overlay)
    _redirect_stat(overlay)
    _redirect_listing(overlay)
    _redirect_folders(overlay)
    _redirect_links(overlay)
    _redirect_attributes(overlay)
    _redirect_working_folders(overlay)
    _record_commands(overlay)
    return overlay


def _replace(name: str, function: Callable[..., Any]) -> None:
    """Replace `os.<name>`, also in sets such as `os.supports_dir_fd`."""
    real = _REAL[name]
    functools.update_wrapper(function, real)
    setattr(os, name, function)
    for functions in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks, os.supports_effective_ids):
        if real in functions:
            functions.add(function)


def _redirect_open(overlay: Overlay) -> None:
    def redirected(file: Any, mode: str) -> Any:
        """The file to open instead. A descriptor stays as it is."""
        if isinstance(file, int):
            return file
        if "x" in mode:
            _refuse_existing(overlay, file, None)
        if _WRITES.intersection(mode):
            return overlay.path_to_write(file, keeps_content="a" in mode or "r" in mode)
        return overlay.path_to_read(file)

    def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        # an opener usually calls os.open, which is redirected, perhaps with a dir_fd
        opener = kwargs.get("opener", args[5] if len(args) > 5 else None)
        is_redirected = isinstance(mode, str) and opener is None
        return _REAL_OPEN(redirected(file, mode) if is_redirected else file, mode, *args, **kwargs)

    def os_open(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        is_new = flags & os.O_CREAT and flags & os.O_EXCL
        follows = not is_new and not flags & getattr(os, "O_NOFOLLOW", 0)
        redirected_path = overlay.path_to_read(path, dir_fd, follows=follows)
        if is_new:
            _refuse_existing(overlay, path, dir_fd)
        if flags & _WRITE_FLAGS and not (getattr(os, "O_TMPFILE", 0) & ~os.O_DIRECTORY) & flags:
            keeps_content = not flags & os.O_TRUNC
            redirected_path = overlay.path_to_write(path, dir_fd, keeps_content=keeps_content, follows=follows)
        return _REAL["open"](redirected_path, flags, mode, dir_fd=dir_fd if redirected_path is path else None)

    class OpenedFile(io.FileIO, metaclass=_FileIOMeta):
        """A FileIO that redirects its path, because its constructor opens a file without calling open."""

        def __init__(self, file: Any, mode: str = "r", closefd: bool = True, opener: Any = None) -> None:
            super().__init__(redirected(file, mode) if opener is None else file, mode, closefd, opener)

    functools.update_wrapper(opened, _REAL_OPEN)
    builtins.open = io.open = opened
    io.FileIO = OpenedFile  # type: ignore[misc]
    _replace("open", os_open)


def _refuse_existing(overlay: Overlay, path: Any, dir_fd: int | None) -> None:
    absolute = overlay.script_path(path, dir_fd, follows=False)
    if absolute is not None and overlay.exists_for_script(absolute):
        raise FileExistsError(17, "File exists", os.fsdecode(path))


_RealFileIO = io.FileIO


class _FileIOMeta(type(io.FileIO)):
    """Makes isinstance accept real FileIO objects, which open() returns."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, _RealFileIO)


def _redirect_stat(overlay: Overlay) -> None:
    """Redirect stat and similar functions to the script's version of a file."""

    def redirected(name: str) -> Callable[..., Any]:
        function = _REAL[name]

        def redirected_call(path: Any = os.curdir, *args: Any, **kwargs: Any) -> Any:  # a default for listxattr
            follows = kwargs.get("follow_symlinks", True) and name != "lstat"
            redirected_path = overlay.path_to_read(path, kwargs.get("dir_fd"), follows=follows)
            if redirected_path is not path and "dir_fd" in kwargs:
                kwargs["dir_fd"] = None
            return function(redirected_path, *args, **kwargs)

        return redirected_call

    for name in ("stat", "lstat", "access", "chdir", "statvfs", "getxattr", "listxattr", "pathconf"):
        if name in _REAL:
            _replace(name, redirected(name))
    for name in ("exists", "lexists", "isfile", "isdir", "islink"):
        _redirect_path_function(overlay, name)

    def readlink(path: Any, *, dir_fd: int | None = None) -> Any:
        redirected_path = overlay.path_to_read(path, dir_fd, follows=False)
        target = _REAL["readlink"](redirected_path, dir_fd=dir_fd if redirected_path is path else None)
        return overlay.as_script_sees(target) if isinstance(target, str) else target

    def getcwd() -> str:
        return overlay.working_folder()

    _replace("readlink", readlink)
    _replace("getcwd", getcwd)
    _replace("getcwdb", lambda: os.fsencode(overlay.working_folder()))


def _redirect_path_function(overlay: Overlay, name: str) -> None:
    function = getattr(os.path, name)
    if getattr(function, "__module__", "") in ("genericpath", "posixpath"):
        return  # a function in Python calls os.stat, which is redirected

    @functools.wraps(function)
    def redirected_call(path: Any) -> bool:
        return function(overlay.path_to_read(path, follows=name not in ("lexists", "islink")))

    setattr(os.path, name, redirected_call)


class _Entry:
    """A DirEntry of os.scandir for any file in a folder whose listing is redirected.

    location  the absolute path from the script's point of view, used to resolve an entry that is a symlink
    """

    def __init__(self, entry: os.DirEntry[Any], path: Any, location: str) -> None:
        self._entry, self.path, self._location = entry, path, location
        self.name: Any = os.fsencode(entry.name) if isinstance(path, bytes) else entry.name

    def __fspath__(self) -> Any:
        return self.path

    def __repr__(self) -> str:
        return f"<DirEntry {self.name!r}>"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._entry, name)

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        is_link = follow_symlinks and self._entry.is_symlink()
        return os.stat(self._location) if is_link else self._entry.stat(follow_symlinks=follow_symlinks)

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        is_link = follow_symlinks and self._entry.is_symlink()
        return os.path.isdir(self._location) if is_link else self._entry.is_dir(follow_symlinks=follow_symlinks)

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        is_link = follow_symlinks and self._entry.is_symlink()
        return os.path.isfile(self._location) if is_link else self._entry.is_file(follow_symlinks=follow_symlinks)


class _Entries:
    """An iterator that can be closed, as os.scandir returns."""

    def __init__(self, entries: Iterator[Any]) -> None:
        self._entries = entries

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._entries)

    def __enter__(self) -> _Entries:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._entries = iter(())


def _entries_of_real_folder(path: Any, real_path: Any) -> _Entries:
    """Return the entries of the real folder `real_path`. Their paths begin with `path`, as the script has given it."""
    with _REAL["scandir"](real_path) as entries:
        return _Entries(
            iter([_Entry(entry, os.path.join(path, entry.name), os.fsdecode(entry.path)) for entry in entries])
        )


def _redirect_listing(overlay: Overlay) -> None:
    def folder_of(path: Any) -> str | None:
        """The absolute path of a folder if the script may see other entries than the real ones; None otherwise."""
        if getattr(overlay.thread_state, "is_busy", False):
            return None
        given = overlay._path_of(path) if isinstance(path, int) else os.curdir if path is None else path
        absolute, is_through_new_link, is_direct = overlay._resolved(given, None, True)
        if absolute is None or is_direct:
            return None
        has_changed = is_through_new_link or _exists(overlay.written + absolute) or _exists(overlay.removed)
        return absolute if has_changed else None

    def listdir(path: Any = None) -> list[Any]:
        absolute = folder_of(path)
        if absolute is None:
            return _REAL["listdir"](overlay.path_to_read(path))
        names = [name for name, _ in overlay.entries_of(absolute)]
        return [os.fsencode(name) for name in names] if isinstance(path, bytes) else names

    def scandir(path: Any = None) -> Any:
        absolute = folder_of(path)
        if absolute is None:
            real_path = overlay.path_to_read(path)
            return _REAL["scandir"](path) if real_path is path else _entries_of_real_folder(path, real_path)
        visible_paths = dict(overlay.entries_of(absolute))
        given = os.curdir if path is None else path
        entries: list[Any] = []
        for folder in (absolute, overlay.written + absolute):
            if not stat.S_ISDIR(_mode(folder)):
                continue
            with _REAL["scandir"](folder) as real_entries:
                for entry in real_entries:
                    if visible_paths.get(entry.name) == entry.path:
                        name = entry.name if isinstance(given, int) else os.path.join(os.fsdecode(given), entry.name)
                        location = os.path.join(absolute, entry.name)
                        path_of_entry = os.fsencode(name) if isinstance(given, bytes) else name
                        entries.append(_Entry(entry, path_of_entry, location))
        return _Entries(iter(entries))

    _replace("listdir", listdir)
    _replace("scandir", scandir)


def _redirect_folders(overlay: Overlay) -> None:
    """Create, remove and rename files and folders only in the script's view."""
    for name in ("mkdir", "mkfifo", "mknod"):
        if name in _REAL:
            _replace(name, _making(overlay, name))
    for name in ("remove", "unlink", "rmdir"):
        _replace(name, _removing(overlay, name))
    for name in ("rename", "replace"):
        _replace(name, _renaming(overlay, name))


def _making(overlay: Overlay, name: str) -> Callable[..., Any]:
    function = _REAL[name]

    def made(path: Any, *args: Any, dir_fd: int | None = None, **kwargs: Any) -> Any:
        absolute = overlay.script_path(path, dir_fd, follows=False)
        if absolute is None:
            direct_path = overlay.path_to_read(path, dir_fd, follows=False)
            return function(direct_path, *args, dir_fd=dir_fd if direct_path is path else None, **kwargs)
        _refuse_existing(overlay, path, dir_fd)
        starts_in_temporary_folder = overlay.start_folder + os.sep in overlay.direct_folders
        if starts_in_temporary_folder and _exists(os.path.dirname(absolute)) and _is_called_by_tempfile():
            # the script was started in /tmp itself, and this is a temporary folder
            overlay.direct_folders += (f"{absolute}{os.sep}",)
            return function(path, *args, **kwargs)
        new_path = overlay.path_to_write(path, dir_fd, follows=False)
        return function(new_path, *args, dir_fd=dir_fd if new_path is path else None, **kwargs)

    return made


def _removing(overlay: Overlay, name: str) -> Callable[..., Any]:
    function = _REAL[name]

    def removed(path: Any, *, dir_fd: int | None = None) -> None:
        absolute = overlay.script_path(path, dir_fd, follows=False)
        if absolute is None:
            direct_path = overlay.path_to_read(path, dir_fd, follows=False)
            function(direct_path, dir_fd=dir_fd if direct_path is path else None)
            return
        written_path, is_real = overlay.written + absolute, _exists(absolute) and not overlay.is_removed(absolute)
        is_folder = stat.S_ISDIR(_mode(absolute))
        if name == "rmdir" and overlay.exists_for_script(absolute) and os.listdir(absolute):
            raise OSError(errno.ENOTEMPTY, "Directory not empty", os.fsdecode(path))
        if is_real and not _exists(written_path) and is_folder is not (name == "rmdir"):
            error = (20, "Not a directory") if name == "rmdir" else (21, "Is a directory")
            raise OSError(*error, os.fsdecode(path))
        if _exists(written_path):
            function(written_path)
        elif not is_real:
            raise FileNotFoundError(2, "No such file or directory", os.fsdecode(path))
        if is_real:
            overlay.mark_removed(absolute)

    return removed


def _renaming(overlay: Overlay, name: str) -> Callable[..., Any]:
    function = _REAL[name]

    def renamed(src: Any, dst: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None) -> None:
        src, dst = _with_folder(overlay, src, src_dir_fd), _with_folder(overlay, dst, dst_dir_fd)
        source = overlay.script_path(src, follows=False)
        destination = overlay.script_path(dst, follows=False)
        if source is None:
            src = overlay.path_to_read(src, follows=False)
        if destination is None:
            dst = overlay.path_to_read(dst, follows=False)
        if source is None and destination is None:
            function(src, dst)
            return
        if source is not None and not overlay.exists_for_script(source):
            raise FileNotFoundError(2, "No such file or directory", os.fsdecode(src), None, os.fsdecode(dst))
        if destination is not None and source != destination and overlay.exists_for_script(destination):
            _remove_empty_folder(src, dst, destination)
        if source is None:  # from a temporary folder into the project, perhaps on another disk
            _move(os.fsdecode(src), overlay.path_to_write(dst, follows=False))
            return
        written_path = overlay.written + source
        if not _exists(written_path) or stat.S_ISDIR(_mode(written_path)):
            _copy_missing(overlay, source)
        if _exists(source) and not overlay.is_removed(source):
            overlay.mark_removed(source)
        new_path = overlay.path_to_write(dst, follows=False) if destination is not None else dst
        if destination is not None and not _exists(new_path):
            function(written_path, new_path)
        else:
            _move(written_path, os.fsdecode(new_path))

    return renamed


def _remove_empty_folder(src: Any, dst: Any, destination: str) -> None:
    """Remove `destination` if it is an empty folder. Raises the errors of the real `rename` of `src` to `dst`."""
    is_folder = stat.S_ISDIR(os.lstat(src).st_mode)
    replaces_folder = stat.S_ISDIR(os.lstat(destination).st_mode)
    if replaces_folder and not is_folder:
        raise IsADirectoryError(21, "Is a directory", os.fsdecode(src), None, os.fsdecode(dst))
    if is_folder and not replaces_folder:
        raise NotADirectoryError(20, "Not a directory", os.fsdecode(src), None, os.fsdecode(dst))
    if replaces_folder:
        os.rmdir(destination)  # raises unless it is empty


def _with_folder(overlay: Overlay, path: Any, dir_fd: int | None) -> Any:
    """The path, joined to the folder of a descriptor if there is one."""
    if dir_fd is None:
        return path
    _REAL["fstat"](dir_fd)  # raises the expected error for a closed descriptor
    return os.path.join(overlay._path_of(dir_fd), os.fsdecode(path))


def _is_called_by_tempfile() -> bool:
    return sys._getframe(2).f_globals.get("__name__") == "tempfile"


def _copy_missing(overlay: Overlay, absolute: str) -> None:
    """Copy a file into the tree, or those files of a folder that are not in the tree yet."""
    written_path = overlay.written + absolute
    _make_folders(os.path.dirname(written_path))
    if not _exists(written_path):
        if not stat.S_ISDIR(_mode(absolute)):
            _copy(absolute, written_path)
            return
        _REAL["mkdir"](written_path)
    if stat.S_ISDIR(_mode(written_path)):
        for name, _ in overlay.entries_of(absolute):  # without files that the script has removed
            _copy_missing(overlay, f"{absolute}/{name}")


def _remove(path: str) -> None:
    """Remove a file, a link, or a folder with its content."""
    if not stat.S_ISDIR(_mode(path)):
        _REAL["remove"](path)
        return
    for name in _REAL["listdir"](path):
        _remove(f"{path}/{name}")
    _REAL["rmdir"](path)


def _move(source: str, target: Any) -> None:
    """Rename a file or folder, or copy and remove it if the target is on a different disk."""
    try:
        _REAL["replace"](source, target)
    except OSError as error:
        if error.errno != 18:  # EXDEV: a different disk
            raise
        _copy(source, os.fsdecode(target))
        _remove(source)


def _redirect_links(overlay: Overlay) -> None:
    def link(
        src: Any,
        dst: Any,
        *,
        src_dir_fd: int | None = None,
        dst_dir_fd: int | None = None,
        follow_symlinks: bool = True,
    ) -> None:
        src, dst = _with_folder(overlay, src, src_dir_fd), _with_folder(overlay, dst, dst_dir_fd)
        absolute = overlay.script_path(dst, follows=False)
        if absolute is None:
            dst = overlay.path_to_read(dst, follows=False)
            if overlay.script_path(src, follows=False) is None:
                _REAL["link"](overlay.path_to_read(src, follows=False), dst, follow_symlinks=follow_symlinks)
                return
        _refuse_existing(overlay, dst, None)
        if absolute is None and _exists(os.fsdecode(dst)):  # outside of the project
            raise FileExistsError(17, "File exists", os.fsdecode(src), None, os.fsdecode(dst))
        redirected_path = os.fsdecode(overlay.path_to_read(src, follows=False))
        new_path = os.fsdecode(overlay.path_to_write(dst, follows=False))
        if not redirected_path.startswith(overlay.written) or not new_path.startswith(overlay.written):
            _REAL["lstat"](redirected_path)  # raises if there is no such file
            # a hard link would let the script change the user's file
            _copy(os.path.join(overlay.working_folder(), redirected_path), new_path)
        else:
            _REAL["link"](redirected_path, new_path)

    def symlink(src: Any, dst: Any, target_is_directory: bool = False, *, dir_fd: int | None = None) -> None:
        _refuse_existing(overlay, dst, dir_fd)
        new_path = overlay.path_to_write(dst, dir_fd, follows=False)
        _REAL["symlink"](src, new_path, target_is_directory, dir_fd=dir_fd if new_path is dst else None)

    _replace("link", link)
    _replace("symlink", symlink)


def _redirect_attributes(overlay: Overlay) -> None:
    """Change permissions, times and lengths only of the script's version of a file.

    If it has none yet, `truncate` copies the file first, and all other changes are ignored.
    """

    def redirected_change(name: str) -> Callable[..., Any]:
        function = _REAL[name]

        def changed(path: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(path, int):
                return None if overlay.is_of_user(path) else function(path, *args, **kwargs)
            follows = kwargs.get("follow_symlinks", True) and name not in ("lchmod", "lchown")
            absolute = overlay.script_path(path, kwargs.get("dir_fd"), follows=follows)
            redirected_path = overlay.path_to_read(path, kwargs.get("dir_fd"), follows=follows)
            if redirected_path is not path:
                kwargs.pop("dir_fd", None)
            if absolute is None:
                return function(redirected_path, *args, **kwargs)
            is_written = os.fsdecode(redirected_path).startswith(overlay.written)
            # if there is no such file, the function raises as the script expects
            return function(redirected_path, *args, **kwargs) if is_written or not _exists(absolute) else None

        return changed

    names = ("chmod", "fchmod", "lchmod", "chown", "fchown", "lchown", "utime", "setxattr", "removexattr", "chflags")
    for name in names:
        if name in _REAL:
            _replace(name, redirected_change(name))

    def truncate(path: Any, length: int) -> None:
        _REAL["truncate"](path if isinstance(path, int) else overlay.path_to_write(path, keeps_content=True), length)

    _replace("truncate", truncate)


def _redirect_working_folders(overlay: Overlay) -> None:
    """Start programs in the script's version of their working folder, which may exist only in the tree."""
    start = subprocess.Popen.__init__

    @functools.wraps(start)
    def redirected(self: subprocess.Popen[Any], *args: Any, **kwargs: Any) -> None:
        if len(args) > 9:  # `cwd` is the tenth argument
            args = (*args[:9], overlay.path_to_read(args[9]), *args[10:])
        if kwargs.get("cwd") is not None:
            kwargs["cwd"] = overlay.path_to_read(kwargs["cwd"])
        start(self, *args, **kwargs)

    subprocess.Popen.__init__ = redirected  # type: ignore[method-assign]


_SHELLS = ("sh", "bash", "dash")
_PREFIXES = ("exec", "env", "nohup", "time")  # of another command
_BUILTINS = ("cd", "export", "set", "source", ".")  # commands of a shell that write no files


def _commands(words: list[str]) -> list[list[str]]:
    """Return the commands that a shell runs, if `words` are `sh -c TEXT`. Other commands are returned unchanged."""
    is_shell = len(words) > 2 and os.path.basename(words[0]) in _SHELLS and words[1] == "-c"
    return _commands_in_shell(words[2]) if is_shell else [words]


def _commands_in_shell(text: str) -> list[list[str]]:
    """Return the commands in the text of a shell, without assignments such as `A=1` before them."""
    import shlex

    tokens = shlex.shlex(text.replace("\n", ";"), posix=True, punctuation_chars=True)
    tokens.whitespace_split = True
    commands: list[list[str]] = [[]]
    for token in tokens:
        if token in (";", "&", "&&", "|", "||", "(", ")"):
            commands.append([])
        elif commands[-1] or not ("=" in token or token in _PREFIXES):
            commands[-1].append(token)
    return [command for command in commands if command and command[0] not in _BUILTINS]


def _record_commands(overlay: Overlay) -> None:
    """Record programs other than Python that the script starts, because their files are not redirected."""

    def record(event: str, arguments: tuple[Any, ...]) -> None:
        try:
            if event == "os.system":
                commands = _commands_in_shell(os.fsdecode(arguments[0]))
            elif event == "os.posix_spawn":  # subprocess uses it, too
                commands = _commands([os.fsdecode(arguments[0]), *map(os.fsdecode, arguments[1][1:])])
            elif event == "subprocess.Popen":
                popen_args = arguments[1]
                is_list = isinstance(popen_args, list | tuple)
                commands = _commands([os.fsdecode(word) for word in popen_args] if is_list else str(popen_args).split())
            else:  # os.exec replaces this process, and its record
                return
            programs = {os.path.basename(words[0]) for words in commands if words}
            overlay.commands |= {program for program in programs if program and not program.startswith("python")}
        except Exception:  # noqa: S110  (it must not end the script)
            pass

    sys.addaudithook(record)
