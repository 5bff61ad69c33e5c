"""All that knows vLLM's inside: the supported lines, an engine in this process, and the bases of out-of-tree models."""
