"""The summary of a job as text. Colors are used only on a terminal, and not with NO_COLOR."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TextIO

from rich.bar import Bar
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from vtorque_report.figures import Figures
from vtorque_report.read import Phase
from vtorque_report.report import JobArray, Report
from vtorque_report.units import duration, percent, size

WIDTH = 100  # maximum columns
PIPED = 80  # columns without a terminal
MAX_GUESTS = 12  # rows of guests; --json and --html have all guests
_BAR_WIDTH = 16
_GOOD, _FAIR, _BAR = "green", "yellow", "cyan"


def show(report: Report | JobArray, file: TextIO) -> None:
    """Print the summary to a file."""
    console = Console(file=file, markup=False, emoji=False, highlight=False, soft_wrap=False)
    console.width = min(WIDTH, console.width) if console.is_terminal else PIPED
    parts = _array(report) if isinstance(report, JobArray) else _parts(report)
    console.print(Group(*parts))


def _array(array: JobArray) -> Iterator[RenderableType]:
    yield Text.assemble((f"Job array {array.display_name}", "bold"), f": {array.state}")
    yield Text()
    yield _rows("element", array.parts)


def _parts(report: Report) -> Iterator[RenderableType]:
    yield from _head(report)
    yield Text()
    yield _use(report)
    if report.parts:
        yield Text()
        yield _rows("node", report.parts)
    if len(report.guests) > 1:
        yield Text()
        yield _guests(report)
    for attempt in report.attempts:
        phases = [p for p in attempt.phases if p.guest is None]
        if phases:
            yield Text()
            yield _phases(phases, f" on {attempt.node}" if len(report.attempts) > 1 else "")
    told = [*report.hints, *report.missing_data]
    if told:
        yield Text()
    for text in told:
        row = Table.grid(padding=(0, 1))
        row.add_row(Text("*", style=_FAIR), Text(text))
        yield row


def _head(report: Report) -> Iterator[Text]:
    first = report.first_attempt
    name = f" ({first.name})" if first.name else ""
    yield Text.assemble((f"Job {report.display_name}{name}", "bold"), f": {report.state}")
    if report.failure_reason:
        yield Text(report.failure_reason)
    yield Text(f"{report.owner_text}, {report.request_text}")
    yield Text(report.time_text)


def _use(report: Report) -> Table:
    total = report.total
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(width=_BAR_WIDTH)
    table.add_column(justify="right", no_wrap=True)
    table.add_column()
    for name, share, said in shares(total):
        table.add_row(Text(name), _bar(share), Text(percent(share)), Text(said))
    for name, said in amounts(total):
        table.add_row(Text(name), Text(), Text(), Text(said))
    return table


def shares(total: Figures) -> Iterator[tuple[str, float, str]]:
    """Yield the figures that are fractions: name, fraction (0 to 1), and an explanation."""
    if total.cpu_share is not None and total.cores is not None and total.cpu is not None:
        of = f"{total.cores:.1f} of {total.vcpus} vCPUs busy, {duration(total.cpu)} of CPU time"
        yield "CPU", total.cpu_share, of
    if total.steal_share is not None and total.steal is not None:
        yield "steal", total.steal_share, f"{duration(total.steal)} waiting for a host CPU"
    if total.overhead_share is not None and total.overhead is not None:
        yield (
            "emulator",
            min(1.0, total.overhead_share),
            f"{duration(total.overhead)} outside of vCPUs",
        )
    if total.memory is not None and total.memory_share is not None:
        of = f"QEMU used at most {size(total.memory)}, {size(total.ram)} requested"
        yield "memory", total.memory_share, of


def amounts(total: Figures) -> Iterator[tuple[str, str]]:
    """Yield the figures that are not fractions: name, and amount as text."""
    if total.disk is not None:
        amount = f"read {size(total.disk[0])}, written {size(total.disk[1])}"
        yield "disk", f"{amount}, without shared directories"
    if total.network is not None:
        yield "network", f"received {size(total.network[0])}, sent {size(total.network[1])}"
    if total.boot is not None:
        yield "boot", f"{duration(total.boot)} until the guests were ready"


def _bar(share: float) -> Bar:
    return Bar(1.0, 0.0, min(1.0, share), width=_BAR_WIDTH, color=_BAR)


def _guests(report: Report) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="bold")
    for name in ("guest", *HEADS):
        table.add_column(name, justify="left" if name == "guest" else "right", no_wrap=True)
    for guest, figures in report.guests[:MAX_GUESTS]:
        table.add_row(*(Text(t) for t in (f"{guest.rank} {guest.hostname}", *cells(figures))))
    more = len(report.guests) - MAX_GUESTS
    if more > 0:
        table.add_row(Text(f"... {more} more: --json"))
    return table


ROW_HEADS = ("time", "CPU", "QEMU memory", "state")


def row(report: Report) -> Sequence[str]:
    """Return a table row for one task or one node, with the columns :data:`ROW_HEADS`."""
    busy, _, memory, *_ = cells(report.total)
    return report.length, busy, memory, report.state


def _rows(what: str, parts: Sequence[tuple[str, Report]]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="bold")
    for name in (what, *ROW_HEADS):
        last = name == ROW_HEADS[-1]
        left = "left" if last or name == what else "right"
        table.add_column(name, justify=left, no_wrap=not last)  # type: ignore[arg-type]
    for name, report in parts:
        table.add_row(*(Text(cell) for cell in (name, *row(report))))
    return table


HEADS = ("CPU", "steal", "QEMU memory", "read", "written", "received", "sent")


def cells(figures: Figures) -> Sequence[str]:
    """Return a table row of figures, with the columns :data:`HEADS`."""
    disk, network = figures.disk, figures.network
    return (
        "-" if figures.cpu_share is None else percent(figures.cpu_share),
        "-" if figures.steal_share is None else percent(figures.steal_share),
        "-" if figures.memory is None else size(figures.memory),
        *(("-", "-") if disk is None else map(size, disk)),
        *(("-", "-") if network is None else map(size, network)),
    )


def _phases(phases: Sequence[Phase], where: str) -> Table:
    start = min(p.start for p in phases)
    whole = max(max(p.end for p in phases) - start, 1e-9)
    table = Table.grid(padding=(0, 2), expand=True)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(ratio=1)
    table.add_row(Text(f"phase{where}", style="bold"), Text("time", style="bold"), Text())
    for phase in phases:
        begin, end = phase.start - start, phase.end - start
        shown = max(end, begin + whole / 200)  # keep short phases visible
        bar = Bar(whole, begin, shown, color=_GOOD if phase.name == "run" else _BAR)
        table.add_row(Text(phase.name), Text(duration(end - begin)), bar)
    return table
