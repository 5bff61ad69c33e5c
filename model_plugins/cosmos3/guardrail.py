"""NVIDIA's guardrail, where a recipe wants it: refuses prompts, and blurs faces in what was made. Its distribution brings the models."""

from __future__ import annotations

from typing import Any

from vllm_omni.api import RequestError, SettingError, StageContext


class Guardrail:
    """Raises SettingError if it cannot be loaded."""

    def __init__(self, ctx: StageContext) -> None:
        off = f"or switch it off: --set {ctx.stage}.args.guardrail=false"
        try:
            from cosmos_guardrail import CosmosSafetyChecker
        except ImportError as error:
            how = "install it with: pip install 'vllm-omni-cosmos3[guardrail]'"
            raise SettingError(f"The guardrail is on, and cannot be imported ({error}): {how}, {off}", stage=ctx.stage) from error
        try:
            self._checker = CosmosSafetyChecker()
        except (OSError, ValueError) as error:  # a hub that is out of reach, or a licence that was not accepted
            wrong = f"The guardrail is on, and its weights cannot be had: {error}. Download nvidia/Cosmos-1.0-Guardrail first, {off}"
            raise SettingError(wrong, stage=ctx.stage) from error
        self._checker.to(ctx.device)

    def check(self, prompt: str) -> None:
        """Raises RequestError for a prompt that it refuses."""
        if not self._checker.check_text_safety(prompt):
            raise RequestError("The guardrail refuses this prompt.", param="prompt")

    def cleaned(self, frames: Any) -> Any:
        """Frames uint8 [frames, height, width, 3] that may be shown. Raises RequestError if none may."""
        checked = self._checker.check_video_safety(frames)
        if checked is None:
            raise RequestError("The guardrail refuses what was made for this prompt.", param="prompt")
        return checked


def wanted(guardrail: Guardrail | None, asked: bool | None) -> Guardrail | None:
    """The guardrail, unless a request does without. Raises RequestError for a request that wants one where there is none."""
    if asked and guardrail is None:
        raise RequestError("'guardrails' is true, and this server runs without them: it has to be started with them.", param="guardrails")
    return None if asked is False else guardrail
