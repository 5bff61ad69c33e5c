"""The declaration: what Cosmos3 takes, gives and lets a client set. Sound, actions and the reasoner are not here yet."""

from __future__ import annotations

from vllm_omni.api import IMAGE, PROGRESS, TEXT, VIDEO, Denoise, Edge, Kind, ModelPlugin, OneShot, Param, Stage, StageGraph

GUARDRAIL = Param("guardrail", bool, False, help="NVIDIA's guardrail, of the distribution cosmos_guardrail")
GUARDRAILS = Param("guardrails", bool, help="false: without the guardrail, if the server has one")
LATENTS = Kind("latents", "float32 [channels, frames, height, width], normalised; meta fps, seed, index")

WEIGHTS = (
    Param("dtype", str, "auto", choices=("auto", "float32", "bfloat16"), help="of the weights; auto: float32 on a CPU"),
    Param("load_format", str, "auto", choices=("auto", "dummy"), help="dummy: random weights, to measure with"),
)

denoiser = Stage(
    "denoiser", Denoise("vllm_omni_cosmos3.denoiser:Denoiser", memory="vllm_omni_cosmos3.sizes:denoiser"), takes=(TEXT, IMAGE, VIDEO),
    gives=(LATENTS, PROGRESS), main=True,
args=(
        *WEIGHTS, GUARDRAIL, Param("offload", str, "none", choices=("none", "layers"), help="layers: in the host's memory till their turn"),
    ),
    params=(
        Param("size", str, "1280x720", help="WIDTHxHEIGHT in pixels", small="64x64"),
        Param("n", int, 1, minimum=1, maximum=64, help="samples to make; each has a seed of its own: the next number"),
        Param("num_frames", int, minimum=1, maximum=1_000, help="frames of a video (default: 189)"),
        Param("fps", float, 24.0, minimum=1, maximum=240, help="frames a second"),
        Param("num_inference_steps", int, 35, minimum=1, maximum=1_000, help="denoising steps", small=2),
        Param("guidance_scale", float, 6.0, minimum=0, maximum=100, help="how strongly the prompt is followed; 1 costs half"),
        Param("negative_prompt", str, "", help="what to move away from"),
        Param("flow_shift", float, minimum=0.01, maximum=100, help="more time at high noise (default: the checkpoint's)"),
        Param("tier", str, "exact", choices=("exact",), help="how exact: there are no approximations yet"),
        Param("max_sequence_length", int, minimum=1, maximum=8192, help="cut the prompt after this many tokens (default: never)"),
        Param("partial_images", int, 0, minimum=0, maximum=3, help="previews of a picture, on the way to it"),
        Param("seed", int, minimum=0, maximum=2**63 - 1, help="another seed, another sample (default: any)"),
        GUARDRAILS,
        Param("use_resolution_template", bool, True, help="tell the model the size in words"),
        Param("use_duration_template", bool, True, help="tell the model the duration in words"),
        Param("condition_frame_indexes_vision", list, items="int", help="latent frames of a video that stay (default: 0 and 1)"),
        Param("condition_video_keep", str, "first", choices=("first", "last"), help="which end of a longer video they come from"),
    ),
)  # fmt: skip
decoder = Stage(
    "decoder", OneShot("vllm_omni_cosmos3.decoder:Decoder", max_batch=1), takes=(LATENTS,), gives=(IMAGE, VIDEO),
    args=(*WEIGHTS, GUARDRAIL), params=(GUARDRAILS,),
)  # fmt: skip

GRAPH = StageGraph("full", edges=(Edge(denoiser, decoder, LATENTS),), outputs={IMAGE: decoder, VIDEO: decoder, PROGRESS: denoiser})
PLUGIN = ModelPlugin(
    "cosmos3", graphs=(GRAPH,), summary="NVIDIA Cosmos3: pictures and videos from words, pictures and videos", licence="Apache-2.0"
)
