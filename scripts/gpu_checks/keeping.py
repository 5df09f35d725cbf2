"""What is kept of a run for the next session: small, and compressed."""

import gzip
import shutil
import tarfile
from pathlib import Path

WORK = "work"
"""Folder of what parts leave to one another; it is not kept."""
MOST_BYTES = 16 * 2**20
"""Of one file; a larger one is not kept."""


def compress(text: str, file: Path) -> None:
    """Write a text, compressed."""
    with gzip.open(file, "wt", encoding="utf-8") as written:
        written.write(text)


def pack(out: Path) -> None:
    """Make one file of each folder, and compress what is long; what is larger than is sent back is left out."""
    for folder in [child for child in out.iterdir() if child.is_dir()]:
        if folder.name != WORK and any(folder.rglob("*")):
            with tarfile.open(out / f"{folder.name}.tar.gz", "w:gz") as tar:
                tar.add(folder, folder.name)
        shutil.rmtree(folder)
    logs = sorted(out.glob("log-*.txt"), key=lambda file: int(file.stem.split("-")[1]))
    compress("\n".join(f"==== {log.name}\n{log.read_text('utf-8', errors='replace')}" for log in logs), out / "logs.gz")
    for file in [*logs, *out.glob("events-*.jsonl")]:
        file.unlink()
    for file in out.glob("*.txt"):
        if file.name != "verdicts.txt" and file.stat().st_size > 2**16:
            compress(file.read_text("utf-8"), file.with_suffix(".txt.gz"))
            file.unlink()
    for file in out.iterdir():
        if not file.stat().st_size:
            file.unlink()
        elif file.stat().st_size > MOST_BYTES:
            file.unlink()
            file.with_suffix(".left_out").write_text(f"{file.name} had more than {MOST_BYTES} bytes\n", "utf-8")
