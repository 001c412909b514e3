"""Work on a log without an engine. LOG is the folder with the segments, such as logs/smollm2.

`cat`, `stat`, `verify` and `export` only read; `sanitize` writes a copy that may be shared; `compact` changes the files
(beside a server that appends, too), never what they say.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leftfold.commands.common import FINDING, OK, UsageError, natural, print_json, subcommands
from leftfold.commands.replay_common import read_log, report_damage

if TYPE_CHECKING:
    from leftfold.events import LogReader
    from leftfold.events.compaction import Retention


def add_arguments(parser: argparse.ArgumentParser) -> None:
    subcommands(
        parser,
        {
            "cat": ("print records as JSON lines", _cat_arguments, run_cat),
            "stat": ("count records, tokens and bytes", _arguments, run_stat),
            "verify": ("check every checksum, number and record", _arguments, run_verify),
            "compact": ("compress closed segments, remove old ones if told", _compact_arguments, run_compact),
            "sanitize": ("write a copy that tells no text and replays alike", _sanitize_arguments, run_sanitize),
            "export": ("requests and steps as tables (CSV or Parquet)", _export_arguments, run_export),
        },
    )


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("log", metavar="LOG", help="the log's folder")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


# cat


def _cat_arguments(parser: argparse.ArgumentParser) -> None:
    _arguments(parser)
    parser.add_argument("--from", dest="first", type=natural, default=0, metavar="SEQ", help="the first record")
    parser.add_argument("--to", dest="last", type=natural, metavar="SEQ", help="the last record")
    parser.add_argument("--type", metavar="TYPE", help="only records of this type, such as forward_done")
    parser.add_argument("--rid", metavar="RID", help="only records that name this request (its id, or its answer's)")


def run_cat(args: argparse.Namespace) -> int:
    """Records one a line; with --json one object that holds them."""
    import orjson

    from leftfold.events import LogError
    from leftfold.events.codec import TAGS
    from leftfold.events.types import EVENTS

    kinds = [TAGS[cls] for cls in EVENTS]
    if args.type is not None and args.type not in kinds:
        raise UsageError(f"--type {args.type}: no such record; there are {', '.join(kinds)}")
    found = []
    reader = read_log(args.log)
    try:
        names = _Naming(_rids(reader, args.rid)) if args.rid is not None else None
        for seq, line in enumerate(reader.lines(), reader.first_seq):
            if args.last is not None and seq > args.last:
                break
            if seq < args.first or (args.type is not None and b'"type":"%b"' % args.type.encode() not in line[:120]):
                continue
            if names is not None and line not in names:
                continue
            if args.json:
                found.append(orjson.loads(line))
            else:
                sys.stdout.write(line.decode() + "\n")
    except LogError as error:
        return report_damage(args.json, error, args.log)
    if args.json:
        print_json({"records": found})
    return OK


def _rids(reader: LogReader, asked: str) -> list[str]:
    from leftfold.replay.names import named

    return named(reader, asked).rids or [asked]


class _Naming:
    """Lines of records that name some requests: as their `rid`, or in a plan's joins, ends and operations."""

    def __init__(self, rids: list[str]) -> None:
        import orjson

        self._rids = set(rids)
        self._texts = [orjson.dumps(rid) for rid in rids]

    def __contains__(self, line: bytes) -> bool:
        import orjson

        if not any(text in line for text in self._texts):
            return False
        record = orjson.loads(line)
        plan = record.get("plan") or {}
        rows = [row[1] for row in plan.get("join", ())] + [row[0] for row in plan.get("ends", ())]
        scores = [one[0] for one in record.get("scores", ())]
        named = [record.get("rid"), *rows, *scores, *(op.get("rid") for op in plan.get("ops", ()))]
        return not self._rids.isdisjoint(filter(None, named))


# stat


def run_stat(args: argparse.Namespace) -> int:
    """Figures of a whole log."""
    from leftfold.events import LogError

    reader = read_log(args.log)
    try:
        found = _figures(reader, Path(args.log))
    except LogError as error:
        return report_damage(args.json, error, args.log)
    if args.json:
        print_json(found)
    else:
        kinds, bytes_of = found.pop("types"), found.pop("type_bytes")
        print("\n".join(f"{name:<16} {'' if value is None else value}" for name, value in found.items()))
        print("\n".join(f"{kind:<16} {count}  ({bytes_of[kind]} bytes)" for kind, count in kinds.items()))
    return OK


def _figures(reader: LogReader, folder: Path) -> dict[str, Any]:
    """`bytes`: as they lie on disk; `plain_bytes`: of the records' lines, uncompressed."""
    from collections import Counter

    import orjson

    kinds: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    prompt = generated = 0
    first_t = last_t = None
    for line in reader.lines():
        record = orjson.loads(line)
        kind = record.get("type", "")
        kinds[kind] += 1
        sizes[kind] += len(line) + 18
        last_t = record.get("t", 0)
        first_t = last_t if first_t is None else first_t
        if kind == "admit":
            prompt += _listed(record.get("prompt"))
        elif kind == "forward_done":
            generated += _listed(record.get("tokens"))
    segments = sorted(folder.glob("[0-9]*.jsonl*"))
    return {
        "events": kinds.total(), "first_seq": reader.first_seq, "segments": len(segments),
        "compressed": sum(path.suffix == ".zst" for path in segments),
        "bytes": sum(path.stat().st_size for path in segments), "plain_bytes": sizes.total(),
        "snapshots": reader.snapshots(), "from_seconds": (first_t or 0) / 1e6, "seconds": (last_t or 0) / 1e6,
        "prompt_tokens": prompt, "sampled_tokens": generated, "types": dict(kinds.most_common()),
        "type_bytes": dict(sizes),
    }  # fmt: skip


def _listed(value: Any) -> int:
    """How many tokens a record lists; what a client or an executor gave instead of a list holds none."""
    return len(value) if isinstance(value, list) else 0


# verify


def run_verify(args: argparse.Namespace) -> int:
    """Whether every line is what was written, none is missing, and each is a record; snapshots likewise."""
    from leftfold.events import LogDamaged, LogError
    from leftfold.events.gaps import gaps

    reader = read_log(args.log)
    damage, events, text = None, 0, ""
    try:
        for _ in reader:
            events += 1
    except LogDamaged as error:
        damage = error.as_dict()
        text = f"damaged log: {error}"
    except LogError as error:
        damage, text = {"reason": str(error)}, f"damaged log: {error}"
    good, bad = _snapshots(reader) if damage is None else ([], [])
    torn = reader.dropped.as_dict() if reader.dropped else None
    first, missing = _first_seq(reader), gaps(args.log)
    if args.json:
        found = {"events": events, "damage": damage, "torn": torn, "first_seq": first}
        known = {"snapshots": good, "bad_snapshots": bad, "gaps": [gap.as_dict() for gap in missing]}
        print_json({**found, **known})
    else:
        print(f"{events} events" + (f"; {torn['size']} bytes of a torn record at the end" if torn else ""))
        lines = [f"the log begins at record {first}"] if first > 1 else []
        lines += [f"snapshots after {', '.join(map(str, good))}"] if good else []
        lines += [f"gap: {gap}" for gap in missing]
        print("\n".join([*lines, *bad, text if damage else "no damage"]))
    return FINDING if damage or bad else OK


def _first_seq(reader: LogReader) -> int:
    from leftfold.events import LogError

    try:
        return reader.first_seq
    except LogError:
        return 1


def _snapshots(reader: LogReader) -> tuple[list[int], list[str]]:
    """Those that can be recovered from, and what is wrong with the others."""
    from leftfold.events import LogError
    from leftfold.replay.errors import UnknownPolicy
    from leftfold.replay.snapshots import restore

    good: list[int] = []
    bad: list[str] = []
    first = reader.first_seq
    for seq in [seq for seq in reader.snapshots() if seq >= first - 1]:  # those before it are of no use, and no harm
        try:
            snapshot = reader.snapshot(seq)
            with suppress(UnknownPolicy):  # good for whoever has its policy; nothing is imported to look at it
                restore(snapshot)
            reader.after(snapshot)
            good.append(seq)
        except LogError as error:
            bad.append(f"bad snapshot: {error}")
    return good, bad


# compact


def _compact_arguments(parser: argparse.ArgumentParser) -> None:
    _arguments(parser)
    parser.add_argument(
        "--keep", type=_retention, metavar="RETENTION",
        help="then remove the oldest segments beyond this age or size, such as 7d or 10GiB (0s: as many as may go); "
        "what a recovery from one of the two newest snapshots needs always stays",
    )  # fmt: skip


def _retention(text: str) -> Retention:
    from leftfold.events import Retention

    try:
        return Retention.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def run_compact(args: argparse.Namespace) -> int:
    """Compress what is closed; a file that cannot be written is a finding."""
    from leftfold.events import LogError, compress_closed, prune

    read_log(args.log)
    try:
        made = compress_closed(args.log)
        gone = prune(args.log, args.keep) if args.keep else []
    except (LogError, OSError) as error:
        return report_damage(args.json, error, args.log)
    if args.json:
        print_json({"compressed": made, "removed": gone})
    else:
        lines = [f"compressed {name}" for name in made] + [f"removed {name}" for name in gone]
        print("\n".join(lines) if lines else "nothing to do")
    return OK


# sanitize


def _sanitize_arguments(parser: argparse.ArgumentParser) -> None:
    _arguments(parser)
    parser.add_argument("out", metavar="OUT", help="the folder of the copy; must not exist, or be empty")
    parser.add_argument(
        "--key", metavar="FILE",
        help="a file whose content is the key, for copies that can be compared (default: a new one, forgotten at once)",
    )  # fmt: skip


def run_sanitize(args: argparse.Namespace) -> int:
    """A copy without texts."""
    from leftfold.events import LogError
    from leftfold.replay.sanitize import SanitizeError, sanitize

    out = Path(args.out)
    try:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise UsageError(f"{out} is there already: give the name of a new folder")
    except OSError as error:
        raise UsageError(f"{out}: {error.strerror}") from error
    try:
        key = Path(args.key).read_bytes() if args.key else None
    except OSError as error:
        raise UsageError(f"--key {args.key}: {error.strerror}") from error
    if key is not None and len(key) < 16:
        raise UsageError(f"--key {args.key}: {len(key)} bytes are too few for a key, give 16 or more")
    try:
        events = sanitize(read_log(args.log), out, key)
    except OSError as error:
        raise UsageError(f"{out}: {error}") from error
    except (LogError, SanitizeError) as error:
        return report_damage(args.json, error, args.log)
    print_json({"events": events, "out": str(out)}) if args.json else print(f"{events} events in {out}")
    return OK


# export


def _export_arguments(parser: argparse.ArgumentParser) -> None:
    _arguments(parser)
    parser.add_argument("out", metavar="OUT", help="the folder that gets requests and steps")
    parser.add_argument("--format", choices=("csv", "parquet"), default="csv", help="parquet needs leftfold[export]")


def run_export(args: argparse.Namespace) -> int:
    """Two tables: one row a request (and choice), one row a step."""
    from leftfold.events import CodecError, LogError
    from leftfold.replay.errors import ReplayError
    from leftfold.replay.export import ExportError, export

    try:
        found = export(read_log(args.log), Path(args.out), args.format)
    except ExportError as error:
        raise UsageError(str(error)) from error
    except OSError as error:
        raise UsageError(f"{args.out}: {error}") from error
    except (LogError, CodecError, ReplayError) as error:
        return report_damage(args.json, error, args.log)
    print_json(found) if args.json else print("\n".join(f"{name:<10} {value}" for name, value in found.items()))
    return OK
