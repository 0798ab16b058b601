"""Run more than 80 file operations and print the result of each, on a node or in a guest.

Run ``python3 file_operations.py DIRECTORY`` as the job's user, with a directory that
tests/e2e/test_same_files.py has prepared. This program needs the standard library only.

``DIFFERENCES`` names the operations whose results differ in a guest. doc/user.md has its rows.
"""

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import select
import socket
import stat
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

#: Operation to the reason why its result differs in a guest, the first column in doc/user.md.
DIFFERENCES = {
    "acl_entry_of_the_user_opens": "Access control lists are not evaluated",
    "acl_is_read": "Access control lists are not evaluated",
    "acl_is_set": "Access control lists are not evaluated",
    "acl_is_copied_by_cp_a": "Access control lists are not evaluated",
    "acl_default_ignores_the_umask": "The umask limits the mask of a default ACL",
    "bind_mounted_file_is_its_source": "A file that is a mount by itself",
    "file_flags_are_read": "File flags and project ids (`lsattr`, `chattr`)",
    "temporary_file_without_name": "`O_TMPFILE`",
}

USER_ENTRY = "colleague's file\n"
AT_FDCWD, O_TMPFILE = -100, 0o20200000
FS_IOC_GETFLAGS, FICLONE = 0x80086601, 0x40049409
RENAME_NOREPLACE, RENAME_EXCHANGE = 1, 2
PUNCH_HOLE = 3  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
NOW = 1_600_000_000_123_456_789  # ns

Result = object
OPERATIONS: dict[str, Callable[[], Result]] = {}
libc = ctypes.CDLL(None, use_errno=True)


def operation(function: Callable[[], Result]) -> Callable[[], Result]:
    """Register a function as an operation, which runs in an empty directory."""
    OPERATIONS[function.__name__] = function
    return function


def check(result: int) -> int:
    """Return the result of a libc function; raise OSError for a negative one."""
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def failure(call: Callable[..., object], *arguments: object) -> str:
    """Return the name of the error of a call, or "none"."""
    try:
        call(*arguments)
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    return "none"


def run(program: str, *arguments: str) -> str:
    """Run a program in /usr, which a guest shares with the node; return output and exit status."""
    command = [f"/usr/bin/{program}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=180)
    return f"{done.stdout}{done.stderr}exit {done.returncode}"


def in_child(function: Callable[[], Result]) -> str:
    """Call a function in a child process; return its result as text."""
    out, into = os.pipe()
    if (child := os.fork()) == 0:
        with contextlib.suppress(BaseException):
            os.write(into, str(function()).encode())
        os._exit(0)
    os.close(into)
    with open(out) as answer:
        said = answer.read()
    os.waitpid(child, 0)
    return said


def make(name: str, content: bytes = b"content", mode: int = 0o644) -> int:
    """Create a file; return its descriptor, open for reading and writing."""
    descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)
    os.write(descriptor, content)
    return descriptor


def mode_of(name: str) -> str:
    return stat.filemode(os.lstat(name).st_mode)


# -- Several file systems below one share: ../../s1, s2 and bound are mounts -----------------------

ROOT = "../.."
PAIRS = (f"{ROOT}/s1/one.txt", f"{ROOT}/s2/one.txt")


@operation
def files_of_two_file_systems_differ() -> Result:
    """Both files have the same inode number."""
    one, two = (os.stat(name) for name in PAIRS)
    return one.st_ino == two.st_ino, os.path.samestat(one, two)


@operation
def hard_links_are_one_file() -> Result:
    return [os.path.samefile(name, name.replace("one", "two")) for name in PAIRS]


@operation
def tar_and_back() -> Result:
    made = run("tar", "-C", ROOT, "-cf", "o.tar", "s1", "s2")
    back = run("tar", "-xf", "o.tar")
    return made, back, contents(), os.stat("s1/one.txt").st_nlink


def contents() -> list[str]:
    return [Path(f"s{n}/{name}.txt").read_text() for n in (1, 2) for name in ("one", "two")]


@operation
def cp_archive() -> Result:
    return run("cp", "-a", f"{ROOT}/s1", f"{ROOT}/s2", "."), contents(), links()


@operation
def rsync_hard_links() -> Result:
    return run("rsync", "-aHX", f"{ROOT}/s1", f"{ROOT}/s2", "."), contents(), links()


def links() -> list[int]:
    return [os.stat(f"s{n}/one.txt").st_nlink for n in (1, 2)]


@operation
def find_xdev() -> Result:
    return run("find", ROOT, "-xdev", "-name", "one.txt", "-not", "-path", "*/work/*")


@operation
def find_samefile() -> Result:
    return run("find", f"{ROOT}/s1", f"{ROOT}/s2", "-samefile", PAIRS[0])


@operation
def du_counts_each_file_once() -> Result:
    return run("du", "--apparent-size", "-b", "-c", *PAIRS, f"{ROOT}/s1/two.txt")


@operation
def statvfs_is_that_of_the_inner_file_system() -> Result:
    inner = os.statvfs(f"{ROOT}/s1")
    return inner.f_blocks * inner.f_frsize


@operation
def mount_points_are_detected() -> Result:
    return [os.path.ismount(f"{ROOT}/{name}") for name in ("s1", "s2", "proj")]


@operation
def rename_to_another_file_system() -> Result:
    os.close(make("a"))
    return failure(os.rename, "a", f"{ROOT}/s1/a")


@operation
def link_to_another_file_system() -> Result:
    return failure(os.link, PAIRS[0], "a")


@operation
def mv_to_another_file_system() -> Result:
    os.close(make("a"))
    done = run("mv", "a", f"{ROOT}/s2/moved")
    return done, Path(f"{ROOT}/s2/moved").read_text(), os.unlink(f"{ROOT}/s2/moved")


@operation
def mount_point_is_removed() -> Result:
    return failure(os.rmdir, f"{ROOT}/s1"), failure(os.rename, f"{ROOT}/s1", f"{ROOT}/s3")


@operation
def parent_of_a_mount_point() -> Result:
    return os.path.samefile(f"{ROOT}/s1/..", ROOT), sorted(os.listdir(f"{ROOT}/s1"))


@operation
def bind_mounted_file_is_its_source() -> Result:
    return os.path.samefile(f"{ROOT}/bound", PAIRS[0]), Path(f"{ROOT}/bound").read_text()


# -- extended attributes and access control lists --------------------------------------------------


@operation
def user_attribute() -> Result:
    os.close(make("a"))
    os.setxattr("a", "user.note", b"text\0\xff")
    found = os.getxattr("a", "user.note"), os.listxattr("a")
    os.removexattr("a", "user.note")
    return found, failure(os.getxattr, "a", "user.note"), os.listxattr("a")


@operation
def user_attribute_is_created_or_replaced() -> Result:
    os.close(make("a"))
    first = failure(os.setxattr, "a", "user.a", b"1", os.XATTR_REPLACE)
    os.setxattr("a", "user.a", b"1", os.XATTR_CREATE)
    return first, failure(os.setxattr, "a", "user.a", b"2", os.XATTR_CREATE)


@operation
def user_attribute_of_a_directory_and_a_link() -> Result:
    os.mkdir("d")
    os.symlink("d", "l")
    os.setxattr("d", "user.a", b"1")
    on_link = failure(lambda: os.setxattr("l", "user.a", b"1", follow_symlinks=False))
    return os.getxattr("l", "user.a"), on_link


@operation
def user_attribute_with_a_long_value() -> Result:
    os.close(make("a"))
    os.setxattr("a", "user.a", b"x" * 2000)
    return len(os.getxattr("a", "user.a")), failure(os.setxattr, "a", "user.b", b"x" * 70000)


@operation
def user_attribute_with_a_long_name() -> Result:
    os.close(make("a"))
    os.setxattr("a", "user." + "n" * 250, b"1")
    return failure(os.setxattr, "a", "user." + "n" * 251, b"1"), len(os.listxattr("a")[0])


@operation
def user_attribute_of_a_file_without_write_permission() -> Result:
    os.close(make("a", mode=0o444))
    return failure(os.setxattr, "a", "user.a", b"1"), failure(
        os.setxattr, "../../rootfile", "user.a", b"1"
    )


@operation
def user_attributes_are_copied() -> Result:
    os.close(make("a"))
    os.setxattr("a", "user.a", b"1")
    said = (
        run("cp", "-a", "a", "b"),
        run("rsync", "-aX", "a", "c"),
        run("tar", "--xattrs", "-cf", "t", "a"),
    )
    os.unlink("a")
    said = *said, run("tar", "--xattrs", "-xf", "t")
    return said, [os.getxattr(name, "user.a") for name in "abc"]


@operation
def other_attributes_are_refused() -> Result:
    os.close(make("a"))
    capability = struct.pack("<5I", 0x02000000, 1 << 13, 0, 0, 0)  # CAP_NET_RAW, version 2
    names = {
        "security.capability": capability,
        "trusted.overlay.opaque": b"y",
        "security.ima": b"1",
    }
    return [failure(os.setxattr, "a", name, value) for name, value in names.items()]


@operation
def acl_entry_of_the_user_opens() -> Result:
    with open(f"{ROOT}/f0640", "r+") as file:
        return file.read()


@operation
def acl_entry_of_a_colleague_blocks_nobody_else() -> Result:
    """Read files of root, by the mode bits for group and others, and a file of the user."""
    names = ("of_group", "of_all", "mine")
    return [Path(ROOT, name).read_text() for name in names], mode_of(f"{ROOT}/of_group")


@operation
def acl_is_read() -> Result:
    return run("getfacl", "-n", f"{ROOT}/mine")


@operation
def acl_is_set() -> Result:
    os.close(make("a"))
    return run("setfacl", "-m", f"u:{os.getuid()}:r", "a"), mode_of("a")


@operation
def acl_is_copied_by_cp_a() -> Result:
    done = run("cp", "-a", f"{ROOT}/mine", "a")
    return done, mode_of("a"), "system.posix_acl_access" in os.listxattr("a")


@operation
def acl_default_with_umask_0() -> Result:
    return modes_with_default_acl(0)


@operation
def acl_default_ignores_the_umask() -> Result:
    return modes_with_default_acl(0o077)


def modes_with_default_acl(umask: int) -> Result:
    os.umask(umask)
    names = [f"{ROOT}/proj/{kind}{umask:o}" for kind in "fd"]
    os.close(make(names[0], mode=0o666))
    os.mkdir(names[1])
    modes = [mode_of(name) for name in names]
    os.unlink(names[0])
    os.rmdir(names[1])
    return modes


# -- names, links, directories ---------------------------------------------------------------------


@operation
def names_of_any_bytes() -> Result:
    names = [b"\xff\xfe", "\u00fc".encode(), b"a\nb", b" ", b"-x", b"\\", b"A", b"a"]
    for name in names:
        os.close(os.open(name, os.O_CREAT | os.O_WRONLY, 0o600))
    return sorted(os.listdir(b"."))


@operation
def names_of_255_bytes() -> Result:
    os.close(make("n" * 255))
    return failure(make, "n" * 256), len(os.listdir(".")[0])


@operation
def paths_of_4095_bytes() -> Result:
    os.close(make("a"))
    return Path("./" * 2047 + "a").read_text(), failure(os.stat, "./" * 2048 + "a")


@operation
def many_entries_are_listed_once() -> Result:
    for number in range(300):
        os.close(os.open(f"file-{number}", os.O_CREAT | os.O_WRONLY, 0o600))
    with os.scandir() as found:
        seen = [(e.name, e.inode() == e.stat().st_ino, e.is_file()) for e in found]
    return len(seen), len(set(seen)), all(each[1:] == (True, True) for each in seen)


@operation
def entries_removed_while_they_are_listed() -> Result:
    for number in range(100):
        os.close(os.open(f"file-{number}", os.O_CREAT | os.O_WRONLY, 0o600))
    with os.scandir() as found:
        for entry in found:
            os.unlink(entry.name)
    return os.listdir(".")


@operation
def rename_over_existing_names() -> Result:
    os.close(make("a", b"a"))
    os.close(make("b", b"b"))
    os.rename("a", "b")
    os.makedirs("d/full")
    os.mkdir("e")
    return os.listdir("."), failure(os.rename, "e", "d"), failure(os.rename, "b", "d")


@operation
def rename_into_itself() -> Result:
    os.makedirs("d/e")
    return failure(os.rename, "d", "d/e/f")


@operation
def rename_noreplace() -> Result:
    os.close(make("a"))
    os.close(make("b"))
    return failure(renameat2, "a", "b", RENAME_NOREPLACE), failure(
        renameat2, "a", "c", RENAME_NOREPLACE
    )


def renameat2(old: str, new: str, flags: int) -> None:
    check(libc.renameat2(AT_FDCWD, old.encode(), AT_FDCWD, new.encode(), flags))


@operation
def exchange_of_two_names() -> Result:
    os.close(make("a", b"a"))
    os.mkdir("b")
    renameat2("a", "b", RENAME_EXCHANGE)
    return mode_of("a"), mode_of("b"), failure(renameat2, "b", "c", 4)


@operation
def hard_link() -> Result:
    os.close(make("a"))
    os.link("a", "b")
    Path("b").write_text("new")
    return os.stat("a").st_nlink, Path("a").read_text(), os.path.samefile("a", "b")


@operation
def hard_link_of_a_symbolic_link() -> Result:
    os.symlink("nowhere", "a")
    os.link("a", "b", follow_symlinks=False)
    return os.readlink("b"), os.lstat("a").st_nlink


@operation
def hard_link_of_a_directory() -> Result:
    os.mkdir("d")
    return failure(os.link, "d", "e")


@operation
def symbolic_links() -> Result:
    os.symlink("b", "a")
    os.symlink("a", "b")
    os.symlink("x" * 4000, "long")
    return failure(os.stat, "a"), os.lstat("a").st_size, len(os.readlink("long")), mode_of("a")


@operation
def symbolic_link_that_must_not_be_followed() -> Result:
    os.close(make("a"))
    os.symlink("a", "l")
    return failure(os.open, "l", os.O_NOFOLLOW), failure(os.open, "a", os.O_DIRECTORY)


@operation
def directory_counts_its_directories() -> Result:
    os.makedirs("d/e")
    os.mkdir("d/f")
    return os.stat("d").st_nlink > 1, failure(os.rmdir, "d"), failure(os.unlink, "d")


@operation
def working_directory_that_was_removed() -> Result:
    os.mkdir("d")
    os.chdir("d")
    os.rmdir("../d")
    return failure(os.getcwd), failure(make, "a")


@operation
def fifo() -> Result:
    os.mkfifo("f", 0o600)
    if (child := os.fork()) == 0:
        with contextlib.suppress(BaseException):
            os.write(os.open("f", os.O_WRONLY), b"through")
        os._exit(0)
    with open("f") as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return said, mode_of("f")


@operation
def unix_socket() -> Result:
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
        server.bind("s")
        server.listen()
        client.connect("s")
    return mode_of("s")


@operation
def device_node() -> Result:
    return failure(os.mknod, "c", stat.S_IFCHR | 0o600, os.makedev(1, 3))


# -- reading and writing ---------------------------------------------------------------------------


@operation
def sparse_file() -> Result:
    file = make("a", b"")
    os.ftruncate(file, 1 << 40)
    os.pwrite(file, b"x", 1 << 30)
    return os.fstat(file).st_size, os.fstat(file).st_blocks < 1000, os.pread(file, 3, (1 << 30) - 1)


@operation
def holes_are_found() -> Result:
    file = make("a", b"")
    os.pwrite(file, b"x" * 65536, 1 << 20)
    os.ftruncate(file, 4 << 20)
    os.fsync(file)
    data = os.lseek(file, 0, os.SEEK_DATA)
    return data, os.lseek(file, data, os.SEEK_HOLE), failure(os.lseek, file, 3 << 20, os.SEEK_DATA)


@operation
def space_is_allocated() -> Result:
    file = make("a", b"")
    os.posix_fallocate(file, 0, 1 << 20)
    return os.fstat(file).st_size, os.fstat(file).st_blocks


@operation
def hole_is_punched() -> Result:
    file = make("a", b"x" * (1 << 20))
    os.fsync(file)
    offset, length = ctypes.c_long(4096), ctypes.c_long(8192)
    check(libc.fallocate(file, PUNCH_HOLE, offset, length))
    return os.pread(file, 2, 4095), os.pread(file, 2, 12287), os.fstat(file).st_size


@operation
def file_shrinks_and_grows() -> Result:
    file = make("a", b"0123456789")
    os.ftruncate(file, 4)
    os.truncate("a", 8)
    return os.pread(file, 20, 0), failure(os.ftruncate, os.open("a", os.O_RDONLY), 1)


@operation
def appends_of_two_processes() -> Result:
    def append() -> None:
        file = os.open("a", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        for _ in range(100):
            os.write(file, b"12345678\n")

    in_child(append)
    append()
    return set(Path("a").read_text().split()), os.stat("a").st_size


@operation
def vectors_are_written_and_read() -> Result:
    file = make("a", b"")
    written = os.pwritev(file, [b"ab", b"cde"], 1)
    parts = [bytearray(2), bytearray(10)]
    return written, os.preadv(file, parts, 0), [bytes(part) for part in parts]


@operation
def direct_io() -> Result:
    file = os.open("a", os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    block = mmap.mmap(-1, 8192)  # aligned
    block.write(b"d" * 8192)
    written = os.write(file, block)
    return written, os.preadv(file, [block], 0), Path("a").read_bytes() == b"d" * 8192


@operation
def mapped_file_is_shared() -> Result:
    file = make("a", b"0" * 8192)
    with mmap.mmap(file, 8192) as mapped:
        in_child(lambda: mapped.__setitem__(slice(0, 3), b"new"))
        mapped[4096] = ord("x")
        mapped.flush()
        return mapped[:4], os.pread(file, 4, 0), os.pread(file, 2, 4096)


@operation
def private_mapping_changes_nothing() -> Result:
    file = make("a", b"0" * 4096)
    with mmap.mmap(file, 4096, flags=mmap.MAP_PRIVATE) as mapped:
        mapped[:3] = b"new"
    return os.pread(file, 3, 0)


@operation
def range_is_copied() -> Result:
    one, two = make("a", b"0123456789"), make("b", b"")
    return os.copy_file_range(one, two, 5, 2), os.pread(two, 9, 0)


@operation
def file_is_cloned() -> Result:
    one, two = make("a"), make("b", b"")
    return failure(fcntl.ioctl, two, FICLONE, one)


@operation
def file_is_sent_to_a_pipe() -> Result:
    file, (out, into) = make("a", b"0123456789"), os.pipe()
    return os.sendfile(into, file, 2, 5), os.read(out, 9), os.splice(file, into, 3, offset_src=0)


@operation
def file_is_synced() -> Result:
    file = make("a")
    directory = os.open(".", os.O_RDONLY)
    return [failure(call, file) for call in (os.fsync, os.fdatasync, libc.syncfs)], failure(
        os.fsync, directory
    )


@operation
def open_file_that_was_removed() -> Result:
    file = make("a", b"old")
    os.unlink("a")
    os.close(make("a", b"new"))
    os.write(file, b"er")
    return os.pread(file, 9, 0), os.fstat(file).st_nlink, os.listdir(".")


@operation
def temporary_file_without_name() -> Result:
    file = os.open(".", O_TMPFILE | os.O_RDWR, 0o600)
    os.write(file, b"text")
    path = f"/proc/self/fd/{file}".encode()
    check(libc.linkat(AT_FDCWD, path, AT_FDCWD, b"a", 0x400))  # AT_SYMLINK_FOLLOW
    return Path("a").read_text()


@operation
def file_is_opened_exclusively() -> Result:
    os.close(make("a"))
    os.symlink("nowhere", "l")
    return failure(make, "a"), failure(make, "l")


@operation
def program_is_run() -> Result:
    os.close(make("p", b"#!/bin/sh\necho run $1\n", 0o755))
    done = subprocess.run(["./p", "it"], capture_output=True, text=True, check=False)
    writing = os.open("p", os.O_WRONLY)
    busy = failure(os.execv, "./p", ["p"])
    os.close(writing)
    return done.stdout, done.returncode, busy


# -- locks and notifications -----------------------------------------------------------------------


@operation
def flock_excludes_another_process() -> Result:
    file = make("a")
    fcntl.flock(file, fcntl.LOCK_EX)
    take = fcntl.LOCK_EX | fcntl.LOCK_NB
    return in_child(lambda: failure(fcntl.flock, os.open("a", os.O_RDWR), take))


@operation
def record_lock_excludes_another_process() -> Result:
    file = make("a", b"0" * 100)
    fcntl.lockf(file, fcntl.LOCK_EX, 10, 20)
    take = fcntl.LOCK_EX | fcntl.LOCK_NB
    inside = in_child(lambda: failure(fcntl.lockf, file, take, 5, 22))
    return inside, in_child(lambda: failure(fcntl.lockf, file, take, 5, 50))


@operation
def open_file_description_lock() -> Result:
    one, two = make("a"), os.open("a", os.O_RDWR)
    lock = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    fcntl.fcntl(one, fcntl.F_OFD_SETLK, lock)
    return failure(fcntl.fcntl, two, fcntl.F_OFD_SETLK, lock)


@operation
def lease() -> Result:
    file = os.open("a", os.O_RDONLY | os.O_CREAT, 0o600)
    fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    return fcntl.fcntl(file, fcntl.F_GETLEASE)


@operation
def changes_are_notified() -> Result:
    notify = check(libc.inotify_init1(os.O_NONBLOCK))
    check(libc.inotify_add_watch(notify, b".", 0x100 | 0x200 | 0x2))  # create, delete, modify
    os.close(make("a"))
    os.unlink("a")
    select.select([notify], [], [], 10)
    events, masks = os.read(notify, 4096), []
    while events:
        _, mask, _, length = struct.unpack_from("iIII", events)
        masks.append(mask)
        events = events[16 + length :]
    return masks


# -- owners, modes and times -----------------------------------------------------------------------


@operation
def modes_follow_the_umask() -> Result:
    os.umask(0o027)
    os.close(make("a", mode=0o666))
    os.mkdir("d", 0o777)
    os.mkfifo("f", 0o666)
    return [mode_of(name) for name in "adf"]


@operation
def modes_are_changed() -> Result:
    os.close(make("a"))
    os.chmod("a", 0o4751)
    changed = mode_of("a")
    os.chmod("a", 0)
    return changed, failure(os.open, "a", os.O_RDONLY), os.access("a", os.R_OK)


@operation
def set_id_bits_are_cleared_by_a_write() -> Result:
    file = make("a", mode=0o755)
    os.chmod("a", 0o6755)
    os.write(file, b"x")
    written = mode_of("a")
    os.chmod("a", 0o6755)
    os.truncate("a", 1)
    return written, mode_of("a")


@operation
def group_of_a_directory_is_inherited() -> Result:
    os.mkdir("d")
    os.chown("d", -1, other_group())
    os.chmod("d", 0o2775)
    os.close(make("d/a"))
    os.mkdir("d/e")
    groups = {os.stat(name).st_gid == other_group() for name in ("d/a", "d/e")}
    return groups, mode_of("d/e")


def other_group() -> int:
    return max(set(os.getgroups()) - {os.getgid()})


@operation
def owner_and_group_are_changed() -> Result:
    os.close(make("a", mode=0o755))
    os.chmod("a", 0o6755)
    os.chown("a", -1, other_group())
    return mode_of("a"), failure(os.chown, "a", 0, -1), failure(os.chown, "a", -1, 0)


@operation
def sticky_directory() -> Result:
    return failure(os.unlink, f"{ROOT}/sticky/of_root"), failure(
        os.rename, f"{ROOT}/sticky/of_root", "a"
    )


@operation
def directory_without_permission() -> Result:
    os.mkdir("d")
    os.close(make("d/a"))
    os.chmod("d", 0o500)
    removed = failure(os.unlink, "d/a"), failure(make, "d/b")
    os.chmod("d", 0o600)
    return removed, failure(os.stat, "d/a"), os.listdir("d"), os.chmod("d", 0o700)


@operation
def files_of_root() -> Result:
    path = f"{ROOT}/rootfile"
    return (
        Path(path).read_text(),
        failure(os.open, path, os.O_WRONLY),
        failure(os.chmod, path, 0o666),
    )


@operation
def times_have_nanoseconds() -> Result:
    os.close(make("a"))
    os.symlink("a", "l")
    os.utime("a", ns=(NOW, NOW + 1))
    os.utime("l", ns=(NOW + 2, NOW + 3), follow_symlinks=False)
    found = os.stat("a"), os.lstat("l")
    return [(each.st_atime_ns - NOW, each.st_mtime_ns - NOW) for each in found]


@operation
def times_before_1970_and_after_2038() -> Result:
    os.close(make("a"))
    os.utime("a", (-1, 2**32 + 1))
    return os.stat("a").st_atime, os.stat("a").st_mtime


@operation
def times_change_with_the_content() -> Result:
    file = make("a")
    os.utime("a", ns=(NOW, NOW))
    os.write(file, b"x")
    os.utime(".", ns=(NOW, NOW))
    os.close(make("b"))
    return os.stat("a").st_mtime_ns > NOW, os.stat(".").st_mtime_ns > NOW


@operation
def file_flags_are_read() -> Result:
    return failure(fcntl.ioctl, make("a"), FS_IOC_GETFLAGS, bytes(8))


@operation
def file_system_is_described() -> Result:
    found = os.statvfs(".")
    return found.f_blocks * found.f_frsize, found.f_namemax, found.f_files


def main() -> None:
    """Run each operation in its own process and directory, and print one line for each."""
    work = Path(sys.argv[1], "work")
    for name, function in OPERATIONS.items():
        (work / name).mkdir(parents=True)
        os.chdir(work / name)
        print(name, in_child(lambda function=function: result(function)), sep="\t", flush=True)


def result(function: Callable[[], Result]) -> str:
    """Return the result of an operation, or its error, in one line."""
    os.umask(0o022)
    try:
        return repr(function())
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    except Exception as error:
        return repr(error)


if __name__ == "__main__":
    main()
