"""The declaration: a language model's answer flows, a sentence at a time, into a voice."""

from __future__ import annotations

from vllm_omni.api import AR, AUDIO, SAMPLING, TEXT, Edge, ModelPlugin, OneShot, Param, Stage, StageGraph

VOICES = ("jf_alpha", "jf_gongitsune", "jf_nezumi", "jf_tebukuro", "jm_kumo")
DEFAULT_VOICE = "jf_gongitsune"
"""See README.md, "Voices", for how it was chosen."""

thinker = Stage(
    "thinker", AR("vllm_omni_speaking_llm.thinker:Thinker"), takes=(TEXT,), gives=(TEXT,), params=SAMPLING, main=True,
)  # fmt: skip
speaker = Stage(
    "speaker", OneShot("vllm_omni_speaking_llm.speaker:Speaker", max_batch=1), takes=(TEXT,), gives=(AUDIO,),
    params=(
        Param("voice", str, DEFAULT_VOICE, choices=(*VOICES, "alloy"), help="who speaks; OpenAI's 'alloy' is the default voice"),
        Param("speed", float, 1.0, minimum=0.25, maximum=4, help="words a second, as a multiple of the usual"),
    ),
    args=(Param("threads", int, 1, minimum=1, maximum=64, help="CPU threads that one sentence is computed with"),),
)  # fmt: skip
"""One sentence a call (`max_batch`): Kokoro's graph takes one, so sharing a call would only make the first wait for the last."""

SPEAKING = StageGraph(
    "speaking",
    edges=(Edge(thinker, speaker, TEXT, bridge="vllm_omni_speaking_llm.bridges:sentences"),),
    outputs={TEXT: thinker, AUDIO: speaker},
)
PLUGIN = ModelPlugin(
    "speaking_llm",
    graphs=(SPEAKING,),
    summary="answers questions aloud: SmolLM2-135M and Kokoro-82M, from Python packages",
    licence="Apache-2.0",
)
