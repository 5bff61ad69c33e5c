"""What a client may set of a stage that samples tokens, under vLLM's names."""

from __future__ import annotations

from vllm_omni.param import Param

SAMPLING = (
    Param("temperature", float, minimum=0, maximum=100, help="0 takes the likeliest token"),
    Param("top_p", float, minimum=0, maximum=1, help="sample from the likeliest tokens that have this probability together"),
    Param("top_k", int, minimum=-1, help="sample from this many likeliest tokens; 0 or -1: from all"),
    Param("min_p", float, minimum=0, maximum=1, help="leave out tokens less likely than this fraction of the likeliest"),
    Param("seed", int, minimum=-(2**63), maximum=2**63 - 1, help="a number of its own for this request's draws"),
    Param("max_tokens", int, minimum=1, maximum=2**31 - 1, help="end after this many tokens (default: when the context is full)", small=1),
    Param("min_tokens", int, minimum=0, maximum=2**31 - 1, help="do not end before this many tokens"),
    Param("stop", list, items="str", help="end before any of these texts"),
    Param("stop_token_ids", list, items="int", help="end at any of these tokens"),
    Param("ignore_eos", bool, help="go on at the end-of-sequence token"),
    Param("presence_penalty", float, minimum=-2, maximum=2, help="against tokens that were generated"),
    Param("frequency_penalty", float, minimum=-2, maximum=2, help="against tokens, by how often they were generated"),
    Param("repetition_penalty", float, minimum=0.01, maximum=100, help="above 1: against tokens of the prompt and the answer"),
)
"""A value that is not given is the checkpoint's (its generation config), or else vLLM's."""
