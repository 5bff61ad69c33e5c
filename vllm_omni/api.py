"""The one module a plugin imports. Re-exports only."""

from vllm_omni.engine import ARModule, DenoiseModule, Job, Memory, OneShotModule, Pause, Row, StageContext
from vllm_omni.errors import OmniError, RequestError
from vllm_omni.graph import AR, Bridge, Denoise, Edge, OneShot, Stage, StageGraph
from vllm_omni.param import Param
from vllm_omni.payload import ACTION, AUDIO, IMAGE, PROGRESS, TEXT, VIDEO, Kind, Payload, action, audio, image, text, video
from vllm_omni.plugin import ModelPlugin
from vllm_omni.sampling import SAMPLING

__all__ = [
    "ACTION", "AR", "AUDIO", "IMAGE", "PROGRESS", "SAMPLING", "TEXT", "VIDEO", "ARModule", "Bridge", "Denoise", "DenoiseModule", "Edge",
    "Job", "Kind", "Memory", "ModelPlugin", "OmniError", "OneShot", "OneShotModule", "Param", "Pause", "Payload", "RequestError", "Row",
    "Stage", "StageContext", "StageGraph", "action", "audio", "image", "text", "video",
]  # fmt: skip
