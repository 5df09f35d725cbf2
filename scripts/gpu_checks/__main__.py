"""Options of `scripts/gpu_check`. Without `--child`, this process conducts others, which are this one with it."""

import argparse
import importlib
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpu_checks.keeping import WORK
from gpu_checks.parts import chosen
from gpu_checks.sizes import SIZES


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="gpu_check", description="Check jaxpage on this machine's GPU.")
    made.add_argument("--out", type=Path, metavar="DIR", help="where results go (default: a new folder, which is told)")
    made.add_argument("--seconds", type=float, default=540, metavar="N", help="end after (%(default)s)")
    made.add_argument("--only", default="", metavar="PART,...", help="these parts only")
    made.add_argument("--sizes", choices=sorted(SIZES), help="how much is measured (default: card; small in a dry run)")
    made.add_argument("--dry-run", action="store_true", help="on a CPU, without Triton: the numbers mean nothing")
    made.add_argument(
        "--before", metavar="MODULE:FUNCTION", help="called with the name of each part before it runs, in its process"
    )
    made.add_argument("--child", metavar="PART,...", help=argparse.SUPPRESS)
    made.add_argument("--events", type=Path, help=argparse.SUPPRESS)
    return made


def main() -> int:
    args = parser().parse_args()
    args.sizes = args.sizes or ("small" if args.dry_run else "card")
    if args.child:
        return run_child(args)
    try:
        parts = chosen([name for name in args.only.split(",") if name])
    except ValueError as error:
        print(f"gpu_check: {error}", file=sys.stderr)
        return 2
    if not args.dry_run and not _has_gpu():
        print("gpu_check: there is no NVIDIA driver here, so no GPU; try --dry-run", file=sys.stderr)
        return 2
    if args.dry_run:
        os.environ["JAX_PLATFORMS"] = "cpu"
        print("a dry run: the numbers mean nothing")
    return conduct(args, parts)


def conduct(args: argparse.Namespace, parts: Any) -> int:
    """Run the parts, and print the table whatever comes."""
    from gpu_checks.conductor import Conductor
    from gpu_checks.keeping import pack
    from gpu_checks.verdicts import is_right, judge, show

    out = (args.out or Path(tempfile.mkdtemp(prefix="gpu_check-"))).resolve()
    out.mkdir(parents=True, exist_ok=True)
    for folder in ("autotune_per_fusion", WORK):
        (out / folder).mkdir(exist_ok=True)
    os.environ["JAXPAGE_CACHE"] = str(out / WORK / "programs")  # what a user's engines compiled is none of ours
    print(f"results are in {out}")
    arguments = ["--sizes", args.sizes, *(["--dry-run"] if args.dry_run else [])]
    arguments += ["--before", args.before] if args.before else []
    conductor = Conductor(out, arguments, args.seconds)

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)
    try:
        conductor.run(parts)
    except KeyboardInterrupt:
        print("interrupted: what follows is what was found")
    verdicts = judge(conductor.found)
    print(show(verdicts), end="")
    pack(out)
    right = is_right(verdicts)
    print(f"{'nothing is wrong' if right else 'not all is right'}; everything is in {out}")
    return 0 if right else 1


def run_child(args: argparse.Namespace) -> int:
    """The parts named, in this process."""
    import faulthandler

    from gpu_checks.child import Context, run_parts

    faulthandler.enable()  # where a driver's fault ends the process, the log says in what
    parts = list(chosen(args.child.split(",")))
    context = Context(SIZES[args.sizes], args.out, args.out / WORK, args.dry_run)
    return run_parts(parts, context, args.events, args.seconds, _function(args.before))


def _function(path: str | None) -> Callable[[str], None] | None:
    if path is None:
        return None
    module, _, name = path.partition(":")
    found: Callable[[str], None] = getattr(importlib.import_module(module), name)
    return found


def _has_gpu() -> bool:
    """Whether a driver is to be loaded; JAX is not asked, which would take the GPU's memory."""
    import ctypes

    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    number = ctypes.c_int(0)
    return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(number)) == 0 and number.value > 0


if __name__ == "__main__":
    sys.exit(main())
