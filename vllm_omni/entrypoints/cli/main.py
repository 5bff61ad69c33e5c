"""The address at which stock vLLM looks for us when its command line says `--omni`: a door to `vllm-omni`, in a fresh interpreter."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Become `vllm-omni` with the same arguments. `-P` keeps a `vllm_omni` in the current folder from taking its place."""
    arguments = [argument for argument in sys.argv[1:] if argument != "--omni"]
    os.execv(sys.executable, [sys.executable, "-P", "-m", "vllm_omni", *arguments])
