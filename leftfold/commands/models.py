"""List the models in the cache: name, size and where they are."""

from __future__ import annotations

import argparse

from leftfold.commands.common import OK, print_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    from leftfold.cache import cache_root
    from leftfold.hub import DEFAULT_MODEL, list_cached

    models = list_cached()
    if args.json:
        rows = [{"name": model.name, "bytes": model.size, "path": str(model.path)} for model in models]
        print_json({"cache": str(cache_root()), "models": rows})
    elif not models:
        print(f"no models in {cache_root()}; `leftfold serve` fetches {DEFAULT_MODEL}")
    else:
        width = max(len(model.name) for model in models)
        for model in models:
            print(f"{model.name:<{width}}  {model.size / 1e6:8.1f} MB  {model.path}")
    return OK
