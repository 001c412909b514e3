"""Read a log without folding it: its records, its figures, its checksums. LOG is the folder with the segments."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

from leftfold.commands.common import FINDING, OK, natural, print_json, subcommands
from leftfold.commands.replay import read_log, report_damage


def add_arguments(parser: argparse.ArgumentParser) -> None:
    subcommands(
        parser,
        {
            "cat": ("print records as JSON lines", _cat_arguments, run_cat),
            "stat": ("count records, tokens and bytes", _arguments, run_stat),
            "verify": ("check every checksum and number", _arguments, run_verify),
        },
    )


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("log", metavar="LOG", help="the log's folder")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _cat_arguments(parser: argparse.ArgumentParser) -> None:
    _arguments(parser)
    parser.add_argument("--from", dest="first", type=natural, default=0, metavar="SEQ", help="the first record")
    parser.add_argument("--to", dest="last", type=natural, metavar="SEQ", help="the last record")
    parser.add_argument("--type", metavar="TYPE", help="only records of this type, such as forward_done")


def run_cat(args: argparse.Namespace) -> int:
    """Records one a line; with --json one object that holds them."""
    import orjson

    from leftfold.events import LogError

    found = []
    try:
        for seq, line in enumerate(read_log(args.log).lines(), 1):
            if args.last is not None and seq > args.last:
                break
            if seq < args.first or (args.type and b'"type":"%b"' % args.type.encode() not in line[:120]):
                continue
            if args.json:
                found.append(orjson.loads(line))
            else:
                sys.stdout.write(line.decode() + "\n")
    except LogError as error:
        return report_damage(args.json, error)
    if args.json:
        print_json({"records": found})
    return OK


def run_stat(args: argparse.Namespace) -> int:
    """Figures of a whole log."""
    from leftfold.events import Admit, CodecError, ForwardDone, LogError
    from leftfold.events.codec import TAGS

    kinds: Counter[str] = Counter()
    prompt = generated = last_t = 0
    try:
        for _, event in read_log(args.log):
            kinds[TAGS[type(event)]] += 1
            last_t = event.t
            if isinstance(event, Admit):
                prompt += len(event.prompt)
            elif isinstance(event, ForwardDone):
                generated += len(event.tokens)
    except (LogError, CodecError) as error:
        return report_damage(args.json, error)
    segments = sorted(Path(args.log).glob("[0-9]*.jsonl*"))
    found = {
        "events": kinds.total(), "segments": len(segments), "bytes": sum(path.stat().st_size for path in segments),
        "seconds": last_t / 1e6, "prompt_tokens": prompt, "sampled_tokens": generated, "types": dict(kinds),
    }  # fmt: skip
    if args.json:
        print_json(found)
    else:
        rows = [(name, value) for name, value in found.items() if name != "types"] + list(kinds.most_common())
        print("\n".join(f"{name:<16} {value}" for name, value in rows))
    return OK


def run_verify(args: argparse.Namespace) -> int:
    """Whether every line is what was written, and none is missing."""
    from leftfold.events import LogDamaged, LogError

    reader = read_log(args.log)
    damage, events = None, 0
    try:
        for _ in reader.lines():
            events += 1
    except LogDamaged as error:
        damage = error.as_dict()
        text = f"damaged log: {error}"
    except LogError as error:
        damage, text = {"reason": str(error)}, f"damaged log: {error}"
    torn = reader.dropped.as_dict() if reader.dropped else None
    if args.json:
        print_json({"events": events, "damage": damage, "torn": torn})
    else:
        print(f"{events} events" + (f"; {torn['size']} bytes of a torn record at the end" if torn else ""))
        print(text if damage else "no damage")
    return FINDING if damage else OK
