"""For tests only: a Triton backend named "cpu", registered by the entry-point group `triton.backends`.

With it on the path and TRITON_INTERPRET=1, a vLLM that was built for CPUs runs its V2 model runner, through Triton's interpreter.
"""
