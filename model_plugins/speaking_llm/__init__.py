"""A language model that speaks: SmolLM2 answers, and Kokoro says each sentence as soon as it is whole."""
