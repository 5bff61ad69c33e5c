"""`vllm-omni serve MODEL`: settles what was said into a deployment, and serves it, or (`--dry-run`) shows it."""

from __future__ import annotations

import argparse
import difflib
import itertools
import os
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

from vllm_omni import discovery, doctor
from vllm_omni.cli.main import hint
from vllm_omni.cli.model import add_settings, add_source, deploy
from vllm_omni.errors import SettingError
from vllm_omni.resolve import TextOnlyError

LEVELS = ("debug", "info", "warning", "error", "critical")

VALUED = ("--host", "--port", "--api-key", "--served-model-name", "--uvicorn-log-level", "--log-level", "--revision", "--hf-token")
"""Our flags that vLLM's server has, too, and that take the next word."""

SHORT = {"-tp": "tensor-parallel-size", "-pp": "pipeline-parallel-size", "-dp": "data-parallel-size", "-q": "quantization"}
"""What vLLM's users abbreviate."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_source(parser)
    add_settings(parser)
    parser.add_argument("--host", default="0.0.0.0", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on, 0 for a free one (default: %(default)s)")
    key = "what a client must send as its bearer token; repeatable (default: $VLLM_API_KEY, or none)"
    parser.add_argument("--api-key", metavar="KEY", action="append", help=key)
    parser.add_argument("--served-model-name", metavar="NAME", help="what clients call the model (default: MODEL)")
    limit = "abort a request that takes longer (default: no limit)"
    parser.add_argument("--request-timeout", metavar="SECONDS", type=float, help=limit)
    start = "give up if the model is not ready after so long (default: no limit)"
    parser.add_argument("--init-timeout", metavar="SECONDS", type=float, help=start)
    media = "clients may name files below it as file:// URLs (default: none)"
    parser.add_argument("--allowed-local-media-path", metavar="DIR", type=Path, help=media)
    store = "where videos are kept, with what is known of them (default: a folder for model and port in $XDG_STATE_HOME/vllm-omni)"
    parser.add_argument("--store", metavar="DIR", type=Path, help=store)
    parser.add_argument("--uvicorn-log-level", "--log-level", dest="log_level", choices=LEVELS, default="info", help="(default: info)")
    parser.add_argument("--dry-run", action="store_true", help="show the resolved recipe and where each value comes from; start nothing")
    parser.set_defaults(flags=True)
    parser.epilog = "Any other flag is vLLM's, and goes to the model's main stage if that runs on vLLM."


def run(args: argparse.Namespace) -> int:
    flags = bare_flags(args.rest, args.parser)
    for flag, value in itertools.pairwise(args.argv):
        if value == args.model and flag.removeprefix("--") in flags:
            args.parser.error(f"write MODEL before {flag}: '{value}' may be the value of that flag.")
    for finding in doctor.own():
        print(f"vllm-omni: warning: {finding.what} {finding.why}{finding.advice}", file=sys.stderr)
    try:
        deployment = deploy(args, served_name=args.served_model_name, flags=flags, weights=not args.dry_run)
    except TextOnlyError:
        return hand_over(args)
    except SettingError as error:
        if (error.param or "").removeprefix("--") in flags:
            args.parser.error(f"{error.message}{hint(str(error.param), args.parser)}")
        raise
    if args.dry_run:
        from vllm_omni.cli.dry_run import describe

        print(describe(deployment))
        return 0
    from vllm_omni.serving.run import Options, serve

    keys = args.api_key or [key for key in [os.environ.get("VLLM_API_KEY")] if key]
    options = Options(keys, args.request_timeout, args.init_timeout, args.allowed_local_media_path, args.store)
    return serve(deployment, options, host=args.host, port=args.port, log_level=args.log_level)


def hand_over(args: argparse.Namespace) -> int:
    """Become vLLM's own server for a model that is nobody else's, with the arguments as they were given.

    Raises SettingError for an argument that only a stage graph has a use for, and if there is no vLLM.
    """
    from vllm_omni.compat.lines import SERVER, install

    ours = {"--recipe": args.recipe, "--set": args.set, "--graph": args.graph, "--store": args.store}
    ours |= {"--request-timeout": args.request_timeout, "--init-timeout": args.init_timeout}
    for flag, value in ours.items():
        if value not in (None, []):
            raise SettingError(f"{flag} has no effect: no plugin owns '{args.model}', so vLLM serves it. Leave it out.", param=flag)
    if not discovery.installed_vllm()[1]:
        wrong = f"No plugin owns '{args.model}', so it is vLLM's to serve, and that is not installed. {install()}"
        raise SettingError(wrong, param="model")
    command = [sys.executable, "-P", "-m", SERVER, "--model", args.model, *_for_vllm(args)]
    print(f"vllm-omni: no plugin owns '{args.model}'; vLLM serves it: {shlex.join(command)}", file=sys.stderr, flush=True)
    if not args.dry_run:
        os.execv(sys.executable, command)
    return 0


def _plain(flag: str) -> str:
    return re.sub("[-_]", "", flag)


def _for_vllm(args: argparse.Namespace) -> Iterator[str]:
    """The words of the command line but for the command, MODEL, and what vLLM calls by another name."""
    words, model = iter(args.argv[args.argv.index("serve") + 1 :]), True
    for word in words:
        if word in VALUED:
            yield "--uvicorn-log-level" if word == "--log-level" else word
            yield from itertools.islice(words, 1)
        elif word == args.model and model:
            model = False
        elif word != "--dry-run":
            yield word


def bare_flags(words: list[str], parser: argparse.ArgumentParser) -> dict[str, str]:
    """Arguments that are not ours, as vLLM's flags: `--name VALUE`, `--name=VALUE`, `--name` (true) and `--no-name` (false)."""
    flags, waiting = {}, ""
    own = {_plain(flag): flag for flag in re.findall(r"(?<![\w-])--[a-z][\w-]+", parser.format_help())}
    for word in (f"--{SHORT[each]}" if each in SHORT else each for each in words):
        if word.startswith("--"):
            name, equals, value = word.removeprefix("--").partition("=")
            swapped = [plain for plain in own if plain != _plain(name) and sorted(plain) == sorted(_plain(name))]
            if near := swapped or difflib.get_close_matches(_plain(name), own, n=1, cutoff=0.84):
                parser.error(f"unknown argument '--{name}'. Did you mean '{own[near[0]]}'?")
            flags[name], waiting = (value, "") if equals else ("true", name)
        elif waiting:
            flags[waiting], waiting = word, ""
        else:
            parser.error(f"unknown argument '{word}'.{hint(word, parser)}")
    off = {name: name.removeprefix("no-") for name, value in flags.items() if name.startswith("no-") and value == "true"}
    return {off.get(name, name): "false" if name in off else value for name, value in flags.items()}
