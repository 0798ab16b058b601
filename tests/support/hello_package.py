"""A small Debian package in a directory that apt reads."""

import hashlib
import subprocess


def hello_package(scratch):
    """Make a package of the site, vtorque-hello, in a directory for apt; return that."""
    scratch.chmod(0o755)  # the build runs as the user nobody
    (scratch / "debs").mkdir()
    tree = scratch / "tree"
    (tree / "DEBIAN").mkdir(parents=True)
    fields = "Package: vtorque-hello\nVersion: 1\nArchitecture: all\nMaintainer: us <us@here>\n"
    (tree / "DEBIAN/control").write_text(f"{fields}Description: a greeting\n")
    (tree / "etc").mkdir()
    (tree / "etc/made-by-package").write_text("hello\n")
    deb = scratch / "debs/vtorque-hello.deb"
    argv = ["dpkg-deb", "--build", "--root-owner-group", str(tree), str(deb)]
    subprocess.run(argv, check=True, capture_output=True)
    digest = hashlib.sha256(deb.read_bytes()).hexdigest()
    file = f"Filename: ./{deb.name}\nSize: {deb.stat().st_size}\nSHA256: {digest}\n"
    (scratch / "debs/Packages").write_text(f"{fields}{file}Description: a greeting\n")
    return scratch / "debs"
