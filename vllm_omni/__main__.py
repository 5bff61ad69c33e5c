"""`python -m vllm_omni`: the command line, for whoever has no `vllm-omni` on the path."""

import sys

from vllm_omni.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
