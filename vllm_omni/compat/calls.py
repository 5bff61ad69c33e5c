"""What the engine may call in vLLM's workers, whichever they are: vLLM mixes it into them (`worker_extension_cls`)."""

from __future__ import annotations

from typing import Any


class Calls:
    """Methods of a worker, under names that vLLM will not use."""

    def omni_take(self, ended: list[str]) -> list[Any]:
        """What the model has emitted since it was last asked; it is told which requests have ended since."""
        model = self.model_runner.get_model()  # type: ignore[attr-defined]
        model.slots.end(ended)
        return list(model.take())
