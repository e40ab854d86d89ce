"""What a conversion will do, and what it did, for people."""

from pathlib import Path
from typing import Any


def describe_plan(summary: dict[str, Any]) -> str:
    """Return a dry run's summary (see `Conversion.summary`) for people."""
    note = f" ({summary['encoder_note']})" if summary["encoder_note"] else ""
    return (
        f"reads   {summary['files']:,} files, {summary['input_bytes'] / 1e9:,.2f} GB: "
        f"{summary['rows']:,} rows, about {summary['text_bytes'] / 1e9:,.2f} GB of text\n"
        f"encodes with {summary['encoder']}{note}, ends documents with "
        f"{summary['eod']['token']} ({summary['eod']['id']}), order by {summary['order']}\n"
        f"writes  {summary['shards']:,} shards of {summary['dtype']}, about "
        f"{summary['tokens']:,} tokens\n"
        f"needs   about {summary['disk_bytes'] / 1e9:,.2f} GB of disk"
    )


def describe_manifest(folder: Path, manifest: dict[str, Any]) -> str:
    """Return what was converted for people."""
    counts, order = manifest["counts"], manifest["order"]
    lines = [
        f"{folder}: {counts['documents']:,} documents, {counts['tokens']:,} tokens",
        f"rows    {counts['rows']:,}, of these {counts['null']:,} null and "
        f"{counts['empty']:,} empty left out",
        f"order   by {order['kind']}, hash {order['hash'][:16]}",
    ]
    if order["duplicates"]:
        lines.append(
            f"note    {order['duplicates']:,} documents share their rank with one before them: "
            "taken in the order of file and row"
        )
    return "\n".join(lines)
