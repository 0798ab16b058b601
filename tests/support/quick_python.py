"""Python programs that start in a millisecond, as doubles of frequently called commands.

A script with :func:`shebang` as its first line runs in a fork of a Python process that has already
imported its modules. The client, in C, passes arguments, environment, directory and standard
streams, and exits with the script's status. ``os.environ`` is exactly the environment of the
caller.
"""

import atexit
import functools
import gc
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

CLIENT = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>
extern char **environ;
static void fail(const char *what) { perror(what); exit(70); }
int main(int argc, char **argv) {
    struct sockaddr_un to = {.sun_family = AF_UNIX};
    char control[CMSG_SPACE(3 * sizeof(int))] = {0}, cwd[4096];
    int end = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0), code;
    strncpy(to.sun_path, argv[1], sizeof to.sun_path - 1);
    if (end < 0 || connect(end, (struct sockaddr *)&to, sizeof to) < 0) fail(argv[1]);
    struct iovec one = {"x", 1};
    struct msghdr message = {.msg_iov = &one, .msg_iovlen = 1, .msg_control = control,
                             .msg_controllen = sizeof control};
    struct cmsghdr *head = CMSG_FIRSTHDR(&message);
    head->cmsg_level = SOL_SOCKET;
    head->cmsg_type = SCM_RIGHTS;
    head->cmsg_len = CMSG_LEN(3 * sizeof(int));
    memcpy(CMSG_DATA(head), (int[]){0, 1, 2}, 3 * sizeof(int));
    if (sendmsg(end, &message, 0) != 1 || !getcwd(cwd, sizeof cwd)) fail("client");
    FILE *out = fdopen(dup(end), "w");
    fprintf(out, "%d%c%s%c", argc - 2, 0, cwd, 0);
    for (int i = 2; i < argc; i++) fwrite(argv[i], 1, strlen(argv[i]) + 1, out);
    for (char **e = environ; *e; e++) fwrite(*e, 1, strlen(*e) + 1, out);
    if (fclose(out)) fail("client");
    shutdown(end, SHUT_WR);
    if (read(end, &code, sizeof code) != sizeof code) fail("the double has died");
    return code;
}
"""


@functools.cache
def shebang(*modules: str, path: tuple[str, ...] = ()) -> str:
    """Return the first line of a script that may use these modules quickly."""
    top = Path(tempfile.mkdtemp(prefix="vtq"))
    (top / "client.c").write_text(CLIENT)
    subprocess.run(["gcc", "-O1", "-o", top / "client", top / "client.c"], check=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(top / "s"))
        listener.listen(64)
        argv = [sys.executable, "-IS", __file__, str(listener.fileno()), ":".join(path), *modules]
        server = subprocess.Popen(argv, stdin=subprocess.PIPE, pass_fds=[listener.fileno()])

    def end() -> None:
        server.stdin.close()
        server.wait()
        shutil.rmtree(top, ignore_errors=True)

    atexit.register(end)
    return f"#!{top}/client {top}/s\n"


def serve(listener: socket.socket) -> None:
    """Run programs until standard input is closed."""
    while 0 not in (ready := select.select([0, listener], [], [], 10)[0]):
        if listener in ready:
            connection, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                run(connection)
            connection.close()
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass


def run(connection: socket.socket) -> None:
    """Run the program that the client requests; send it the exit code."""
    _, files, *_ = socket.recv_fds(connection, 1, 3)
    with connection.makefile("rb") as given:
        count, cwd, *words = given.read().split(b"\0")[:-1]
    for target, source in enumerate(files):
        os.dup2(source, target)
        os.close(source)
    sys.stdin, sys.stdout, sys.stderr = (
        open(n, mode, encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
        for n, mode in enumerate("rww")
    )
    os.chdir(cwd)
    os.environb.clear()
    os.environb.update(item.split(b"=", 1) for item in words[int(count) :])
    sys.argv = [os.fsdecode(word) for word in words[: int(count)]]
    code = 0
    try:
        source = Path(sys.argv[0]).read_bytes()
        exec(compile(source, sys.argv[0], "exec"), {"__name__": "__main__"})  # noqa: S102
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            sys.stderr.write(f"{error.code}\n")
    except BaseException:
        code = 1
        traceback.print_exc()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        connection.sendall(code.to_bytes(4, sys.byteorder))
        os._exit(code & 0xFF)


if __name__ == "__main__":
    number, path, *modules = sys.argv[1:]
    sys.path[:0] = path.split(":") if path else []
    for module in modules:
        __import__(module)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.freeze()  # a collection would copy memory that the forks share
    gc.disable()
    serve(socket.socket(fileno=int(number)))
