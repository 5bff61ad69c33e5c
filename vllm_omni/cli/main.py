"""The command line. A command's module is imported when it is asked for; errors become one line and an exit code."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from importlib import import_module

from vllm_omni import __version__
from vllm_omni.errors import OmniError, did_you_mean

COMMANDS = {
    "serve": "serve a model over HTTP, in OpenAI's protocol",
    "generate": "run a model once, without a server",
    "demo": "serve a model, ask it one question and write down the answer",
    "doctor": "say what this machine and this environment are, and what is wrong with them",
    "models": "list the installed model plugins",
    "graph": "show a model's stages and what flows between them",
    "new-plugin": "write the folder of a new model plugin",
}
"""What each says of itself. The module of a command has `add_arguments(parser)` and `run(args) -> exit code`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line (default: that of this process). Returns the exit code; a usage error exits with 2, as argparse does."""
    if not sys.platform.startswith("linux"):
        print(f"vllm-omni: error: vllm-omni runs on Linux only, and this is {sys.platform}.", file=sys.stderr)
        return 1
    try:
        code = _run(list(sys.argv[1:] if argv is None else argv))
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except BrokenPipeError:  # whoever read our output has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OmniError as error:
        print(f"vllm-omni: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _run(argv: list[str]) -> int:
    parser = argparse.ArgumentParser("vllm-omni", description="Omni-modality models on an unmodified vLLM.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"vllm-omni {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    asked = next((word for word in argv if not word.startswith("-")), None)
    for name, text in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".", allow_abbrev=False)
        if name == asked:
            module = import_module(f"vllm_omni.cli.{name.replace('-', '_')}")
            module.add_arguments(command)
            command.set_defaults(run=module.run, parser=command)
    args, rest = parser.parse_known_args(argv)
    if rest and "flags" not in args:
        args.parser.error(f"unknown argument '{rest[0]}'.{hint(rest[0], args.parser)}")
    args.rest, args.argv = rest, argv
    code: int = args.run(args)
    return code


def hint(argument: str, parser: argparse.ArgumentParser) -> str:
    """The flag of this command that was probably meant."""
    known = set(re.findall(r"(?<!\w)--?[a-z][\w-]*", parser.format_help()))
    return did_you_mean(argument.partition("=")[0], known) if argument.startswith("-") else ""
