"""``-vm iocm=true``: reserve CPU cores for the I/O of each guest."""

from collections.abc import Iterator

from vtorque_core.api import (
    Extra,
    JobRequest,
    Option,
    Refusal,
    boolean,
    constant_hook,
    count,
    hookimpl,
)
from vtorque_core.api.vm_options import VMS_PER_NODE, show_boolean

IOCM = Option(
    "iocm",
    boolean,
    False,
    "reserve cores for the guest's I/O",
    "BOOL",
    show_boolean,
    needs_root=bool,
)
MIN_CORES = Option("iocm_min_cores", count, 1, "minimum number of I/O cores of a guest", "N")
MAX_CORES = Option(
    "iocm_max_cores", count, 0, "maximum number, under load; 0: the site's maximum", "N"
)

vtorque_options = constant_hook(IOCM, MIN_CORES, MAX_CORES)


@hookimpl
def vtorque_needs(request: JobRequest) -> Iterator[Extra]:
    """Request the guests' I/O cores from the batch system: ``iocm_max_cores`` for each guest.

    Without ``iocm_max_cores``, request ``iocm_min_cores``. Guests may then also get cores that the
    job leaves idle, up to the site's maximum.
    """
    if request[IOCM]:
        yield Extra(cpus=request[VMS_PER_NODE] * (request[MAX_CORES] or request[MIN_CORES]))


@hookimpl
def vtorque_parse_args(request: JobRequest) -> Iterator[Refusal]:
    """Refuse inconsistent I/O core options."""
    least, most = request[MIN_CORES], request[MAX_CORES]
    if not request[IOCM]:
        for option in (MIN_CORES, MAX_CORES):
            if option.key in request.given:
                value = str(request[option])
                yield Refusal("needs iocm=true", option.key, value, fix="add iocm=true")
    elif least < 1:
        yield Refusal("is too small", MIN_CORES.key, str(least), "1 or more", fix="leave out iocm")
    elif most and least > most:
        fix = "lower the minimum or raise the maximum"
        limit = f"{MAX_CORES.key}={most}"
        yield Refusal(f"is more than {MAX_CORES.key}", MIN_CORES.key, str(least), limit, fix=fix)
