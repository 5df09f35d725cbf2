"""What was to be expected, and whether it was met.

A row of results is judged by what it holds:

    ok                                   a check: false is wrong
    seconds, share, bytes and/or flops   a time: the least that moves and computes so much at this card's peaks, over
                                         the share of them that it should reach, and `fixed` seconds; longer is slow
    value, at_least or at_most           a measure of its own
    skipped                              why there is nothing to judge

Other rows are there to be read. Peaks are those that the part of that name measured, else of the data sheet, of which a
card reaches some nine tenths in copies and eight in products (an H200: 4.3 of 4.8 TB/s, 790 of 989 TFLOP/s).
"""

from dataclasses import dataclass, field
from typing import Any

Row = dict[str, Any]
COPY_SHARE, PRODUCT_SHARE = 0.88, 0.76
"""Of a data sheet's peaks, what a large copy and a large product should reach at least."""
TOLERANCE = 1.1
"""Times what was expected is not yet slow."""
MOST_LISTED = 4
"""Of the checks of a part that are wrong; the others are in `results.json`."""
WRONG = ("wrong", "error", "skipped for lack of time")


@dataclass
class Found:
    """Of one part."""

    status: str = "waiting"
    """Then running, and at last done, error or skipped."""
    why: str = ""
    """Of an error, with the end of its traceback."""
    seconds: float = 0.0
    rows: list[Row] = field(default_factory=list)


@dataclass(frozen=True)
class Verdict:
    """A line of the table."""

    part: str
    case: str
    expected: str
    measured: str
    verdict: str
    """ok, slow, wrong, error, skipped, or skipped for lack of time."""
    do: str = ""
    """What comes of it."""


@dataclass(frozen=True)
class Peaks:
    """Of this card, per second."""

    num_bytes: float
    flops: float


DO = {
    "machine": "install what is missing; see the log of this part",
    "engine": "a slow step: read products, decode_attention and trace; an error: the log, then --only engine",
    "draws": "a draw takes more than a tenth of a greedy step: read the kernels of the draws in the trace",
    "modes": "the host is in the way: compare host_us_* of the modes with the step",
    "programs": "products without a tuned configuration: keep autotune.txt and see ops/tuned",
    "trace": "graphs are updated or the device idles: open the trace in Perfetto",
    "compile_artifact": "the compiler plugin or the assembler is missing: see the log",
    "peaks": "the card is slower than its kind: another process, or its clocks? See nvidia-smi in results.json",
    "attention": "do not serve: the kernel's cases and seeds are in results.json, run tests/kernel with them",
    "kv_writes": "do not serve: the cases and seeds are in results.json",
    "tokens": "do not serve: compare hidden states layer by layer with a CPU in float32",
    "decode_attention": "scripts/tune_kernels, and keep the file in ops/tuned",
    "prefill_attention": "scripts/tune_kernels, and keep the file in ops/tuned",
    "products": "compare the configuration named with others: XLA_FLAGS=--xla_gpu_enable_triton_gemm=false",
    "artifact": "an artifact is behind what compiles here: give its compiler the autotune results of this run",
    "tensor_parallel": "collectives are outside of graphs: read the trace of one device",
}
SHARED_DO = {"skipped for lack of time": "run again with --only and this part's name"}


def judge(found: dict[str, Found]) -> list[Verdict]:
    """The table so far, in the order of the parts."""
    peaks = peaks_of(found)
    verdicts = []
    for part, it in found.items():
        checks = [row for row in it.rows if "ok" in row]
        if checks:
            verdicts += _judge_checks(part, checks)
        verdicts += [verdict for row in it.rows if (verdict := _judge_row(part, row, peaks)) is not None]
        if it.status == "error":
            verdicts.append(_verdict(part, "", "to run", it.why.splitlines()[0][:120], "error"))
        elif it.status == "skipped":
            verdicts.append(_verdict(part, "", "to run", it.why, "skipped for lack of time"))
        elif it.status in ("waiting", "running"):
            verdicts.append(_verdict(part, "", "to run", "it has not ended", "skipped for lack of time"))
        elif not any(verdict.part == part for verdict in verdicts):
            verdicts.append(_verdict(part, "", "to run", f"{it.seconds:.1f} s", "ok"))
    return verdicts


def is_right(verdicts: list[Verdict]) -> bool:
    """Whether all ran and nothing was wrong. Slow is not wrong."""
    return not any(verdict.verdict in WRONG for verdict in verdicts)


def peaks_of(found: dict[str, Found]) -> Peaks | None:
    """Measured, else those of a data sheet, else None."""
    rows = [row for part in ("machine", "peaks") if part in found for row in found[part].rows]
    measured: dict[str, float] = {}
    for row in rows:
        if sheet := row.get("sheet_bytes_per_second"):
            measured |= {"bytes": COPY_SHARE * sheet, "flops": PRODUCT_SHARE * row["sheet_flops_per_second"]}
        if kind := row.get("peak"):
            measured[kind] = row["value"] * row["scale"]
    return Peaks(measured["bytes"], measured["flops"]) if measured.keys() >= {"bytes", "flops"} else None


def floor_seconds(row: Row, peaks: Peaks) -> float:
    """The least that what a row tells of can take."""
    return max(row.get("bytes", 0) / peaks.num_bytes, row.get("flops", 0) / peaks.flops)


def _judge_row(part: str, row: Row, peaks: Peaks | None) -> Verdict | None:
    case = str(row.get("case", ""))
    if "skipped" in row:
        return _verdict(part, case, "to run", str(row["skipped"]), "skipped")
    if "seconds" in row and "share" in row:
        if peaks is None:
            return _verdict(part, case, "peaks to compare with", _time(row["seconds"]), "skipped")
        floor = floor_seconds(row, peaks)
        expected = floor / row["share"] + row.get("fixed", 0.0)
        measured = f"{_time(row['seconds'])} ({100 * floor / max(row['seconds'], 1e-12):.0f} % of the peak)"
        slow = not row["seconds"] <= TOLERANCE * expected  # NaN is
        return _verdict(part, case, f"<= {_time(expected)}", measured, "slow" if slow else "ok")
    if "at_least" in row or "at_most" in row:
        value, unit = row["value"], row.get("unit", "")
        sign, limit = (">=", row["at_least"]) if "at_least" in row else ("<=", row["at_most"])
        fine = value >= limit if sign == ">=" else value <= limit
        return _verdict(part, case, f"{sign} {limit:.4g} {unit}", f"{value:.4g} {unit}", "ok" if fine else "slow")
    return None


def _judge_checks(part: str, rows: list[Row]) -> list[Verdict]:
    """One line for all that is right, and some of what is wrong."""
    wrong = [row for row in rows if not row["ok"]]
    verdicts = [
        _verdict(part, str(row.get("case", "")), str(row.get("expected", "right")), _measured(row), "wrong")
        for row in wrong[:MOST_LISTED]
    ]
    summary = f"{len(rows) - len(wrong)} of {len(rows)}"
    return [*verdicts, _verdict(part, "all checks", f"{len(rows)} right", summary, "wrong" if wrong else "ok")]


def _measured(row: Row) -> str:
    return f"error {row['error']:.3g}" if "error" in row else str(row.get("measured", "otherwise"))


def _verdict(part: str, case: str, expected: str, measured: str, verdict: str) -> Verdict:
    do = "" if verdict in ("ok", "skipped") else SHARED_DO.get(verdict, DO.get(part, ""))
    return Verdict(part, case, expected, measured, verdict, do)


def _time(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.3g} us"


def show(verdicts: list[Verdict]) -> str:
    """As a table for people."""
    head = Verdict("part", "case", "expected", "measured", "verdict", "what to do")
    lines = [(it.part, it.case, it.expected, it.measured, it.verdict, it.do) for it in (head, *verdicts)]
    widths = [max(len(line[column]) for line in lines) for column in range(5)]
    rows = []
    for *cells, do in lines:
        padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        rows.append(f"{'  '.join(padded)}  {do}".rstrip())
    counts = {name: sum(it.verdict == name for it in verdicts) for name in ("ok", "slow", "skipped", *WRONG)}
    return "\n".join([*rows, ", ".join(f"{number} {name}" for name, number in counts.items() if number), ""])
