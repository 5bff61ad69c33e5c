"""Cosmos3 at the Nano size on one GPU: ours and diffusers side by side, with random weights.

`python tests/bench/cosmos3_gpu.py GROUP OUT.json` for each group, well under ten minutes each (`GROUP:native` is one side of it), and
`… merge RESULT.json OUT.json…` for the table. Clock from prompt to uint8 frames on the host; encoding to a file apart.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nano
import torch

STEPS = 35
SHAPES = {
    "t2i-256": (320, 192, 1), "t2i-480": (832, 480, 1), "t2i-720": (1280, 720, 1),
    "t2v-256": (320, 192, 189), "t2v-480": (832, 480, 189), "t2v-720": (1280, 720, 189),
}  # fmt: skip
PUBLISHED = {"t2i-256": 1.57, "t2i-480": 1.52, "t2i-720": 2.60, "t2v-256": 6.79, "t2v-480": 58.14, "t2v-720": 208.36}
"""Seconds, of the fastest engine, on this card: NVIDIA's inference_benchmarks.md for Cosmos3-Nano, row "H200 141GB HBM3", one GPU."""


def measured(call: Callable[[], Any]) -> tuple[float, float, Any]:
    """Seconds, GB at the peak, and the result."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    found = call()
    torch.cuda.synchronize()
    return time.perf_counter() - began, torch.cuda.max_memory_allocated() / 1e9, found


def ask(omni: Any, workload: str, steps: int = STEPS, guidance: float = 6.0) -> Any:
    """Frames on the host, by ours."""
    width, height, frames = SHAPES[workload]
    asked = {"size": f"{width}x{height}", "num_inference_steps": steps, "seed": 1, "guidance_scale": guidance}
    if frames == 1:
        return omni.generate(nano.PROMPT, "image", **asked).images[0]
    return omni.generate(nano.PROMPT, "video", num_frames=frames, **asked).video


def call(pipeline: Any, workload: str, steps: int = STEPS, output: str = "frames", guidance: float = 6.0) -> Any:
    """The same by diffusers: uint8 frames on the host, or latents."""
    width, height, frames = SHAPES[workload]
    made = pipeline(
        nano.PROMPT, height=height, width=width, num_frames=frames, num_inference_steps=steps, guidance_scale=guidance,
        generator=torch.Generator().manual_seed(1), output_type="latent" if output == "latent" else "pt",
    ).video  # fmt: skip
    return made if output == "latent" else (made * 255).round().to(torch.uint8).cpu()


def native(where: Path, workloads: list[str], runs: int, warm_steps: int) -> list[dict[str, Any]]:
    rows = []
    with nano.ours(where, load_format="dummy") as omni:
        for workload in workloads:
            ask(omni, workload, warm_steps)
            found = [measured(lambda: ask(omni, workload)) for _ in range(runs)]  # noqa: B023 - called at once
            whole = statistics.median(seconds for seconds, _, _ in found)
            decode = statistics.median(measured(lambda: decoded(omni, workload))[0] for _ in range(runs))  # noqa: B023
            rows.append(row(workload, "native", whole, whole - decode, decode, max(peak for _, peak, _ in found)))
    return rows


def decoded(omni: Any, workload: str) -> Any:
    """What the decoder takes alone."""
    width, height, frames = SHAPES[workload]
    autoencoder = decoder(omni).autoencoder
    noise = torch.randn(autoencoder.channels, (frames - 1) // 4 + 1, height // 16, width // 16, device=autoencoder.mean.device)
    with torch.inference_mode():
        return [part.cpu() for part in autoencoder.decode(noise)]


def diffusers(where: Path, workloads: list[str], runs: int) -> list[dict[str, Any]]:
    rows = []
    pipeline = nano.theirs(where)
    for workload in workloads:
        call(pipeline, workload, 2)
        if runs:
            found = [measured(lambda: call(pipeline, workload)) for _ in range(runs)]  # noqa: B023
            whole, peak = statistics.median(seconds for seconds, _, _ in found), max(peak for _, peak, _ in found)
            denoise = measured(lambda: call(pipeline, workload, output="latent"))[0]  # noqa: B023
        else:  # from a few steps
            few, more = (measured(lambda: call(pipeline, workload, steps, "latent"))[0] for steps in (1, 3))  # noqa: B023
            denoise = few + (more - few) / 2 * (STEPS - 1)
            last, peak, _ = measured(lambda: call(pipeline, workload, 1))  # noqa: B023
            whole = denoise + last - few
        rows.append(row(workload, "diffusers", whole, denoise, whole - denoise, peak))
    return rows


def row(workload: str, engine: str, whole: float, denoise: float, decode: float, peak: float) -> dict[str, Any]:
    made = {
        "workload": workload, "engine": engine, "tier": "exact", "end_to_end_s": round(whole, 3), "denoise_s": round(denoise, 3),
        "decode_s": round(decode, 3), "peak_gb": round(peak, 1), "error_to_exact": None,
    }  # fmt: skip
    print(json.dumps(made), flush=True)
    return made


def correct(where: Path) -> list[dict[str, Any]]:
    """Latents of four steps: how far diffusers' in bfloat16, and ours, are from diffusers' in float32. From the same file of weights.

    Guidance multiplies what rounding does, and random weights do not damp it; so it is measured without guidance, too.
    """
    pipeline = nano.theirs(where)
    pipeline.transformer.save_pretrained(where / "transformer", max_shard_size="100GB")
    pipeline.vae.save_pretrained(where / "vae")
    cases = [(workload, guidance) for workload in ("t2i-256", "t2v-256") for guidance in (6.0, 1.0)]

    def reference(pipeline: Any, steps: int = 4) -> list[Any]:
        return [call(pipeline, workload, steps, "latent", guidance)[0].float().cpu() for workload, guidance in cases]

    low = reference(pipeline)
    pipeline.transformer.float()
    pipeline.vae.float()
    exact, moved = reference(pipeline), reference(pipeline, 3)
    del pipeline
    forget()
    found: list[dict[str, Any]] = [
        {
            "workload": workload,
            "guidance": guidance,
            "diffusers_to_fp32": off(low[n], exact[n]),
            "reference_reacts": off(moved[n], exact[n]),
        }
        for n, (workload, guidance) in enumerate(cases)
    ]
    print(json.dumps(found), flush=True)
    cases_of = list(enumerate(cases))
    for name, some, args in (
        ("ours_to_fp32", cases_of, {}), ("ours_offloaded_to_fp32", cases_of[:1], {"offload": "layers"}),
        ("ours_in_fp32_to_fp32", cases_of, {"dtype": "float32"}),
    ):  # fmt: skip
        began = time.perf_counter()
        with nano.ours(where, **args) as omni:
            print("start", args, round(time.perf_counter() - began, 1), flush=True)
            for number, (workload, guidance) in some:
                found[number][name] = off(latents(omni, workload, guidance), exact[number])
            if "offload" in args:
                found[0]["offloaded_gb"] = round(measured(lambda: ask(omni, "t2i-256", 4))[1], 1)
        forget()
        print(json.dumps(found), flush=True)
    return found


def forget() -> None:
    """Free what nobody uses any more, so that a peak is of what comes next."""
    gc.collect()
    torch.cuda.empty_cache()


def off(one: Any, exact: Any) -> float:
    return float((one.float().cpu() - exact).norm() / exact.norm())


def latents(omni: Any, workload: str, guidance: float) -> Any:
    """Those that the decoder is given, after four steps."""
    module, seen = decoder(omni), []
    decode = module.run
    module.run = lambda rows: (seen.extend(each.data for _, each in rows), decode(rows))[1]
    ask(omni, workload, 4, guidance)
    del module.run
    return seen[0]


def decoder(omni: Any) -> Any:
    """The module of that stage."""
    return next(host._engine._module for host in omni._omni._orchestrator._replicas._hosts if host._context.stage == "decoder")


def check(where: Path) -> list[dict[str, Any]]:
    """Kernels against torch, a first run of everything, and where the time of a step goes."""
    from vllm_omni.kit.attention import Spans, by_torch, choose
    from vllm_omni.kit.fused import gated, placed

    torch.manual_seed(0)
    kind: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    wide = torch.randn(1000, 2 * 12288, **kind)
    found = {"gated": float((gated(wide).float() - gated(wide.float(), fused=False)).abs().max())}
    heads, angles = torch.randn(1000, 48, 128, **kind), torch.randn(1000, 64, device="cuda")
    norms = (torch.randn(128, **kind), torch.randn(128, **kind))
    made = []
    for fused, given in ((True, heads), (False, heads.float())):
        parts = [torch.zeros(1000, 32, 128), torch.zeros(1300, 8, 128), torch.zeros(1300, 8, 128)]
        parts = [part.to(given) for part in parts]
        order = torch.randperm(1300, generator=torch.Generator().manual_seed(0))[:1000].int().cuda()
        placed(given, *parts, order, angles.cos(), angles.sin(), norms, 1e-6, fused=fused)
        made.append(parts)
    found["placed"] = max(float((one.float() - other.float()).abs().max()) for one, other in zip(*made, strict=True))
    spans = Spans.of((700, 300), (900, 400), "cuda")
    query, keys, values = torch.randn(1000, 32, 128, **kind), torch.randn(1300, 8, 128, **kind), torch.randn(1300, 8, 128, **kind)
    best, exact = (
        choose("cuda", torch.bfloat16, 128)(query, keys, values, spans),
        by_torch(query.float(), keys.float(), values.float(), spans),
    )
    found["attention"] = float((best.float() - exact).norm() / exact.norm())
    print(json.dumps(found), flush=True)
    began = time.perf_counter()
    with nano.ours(where, load_format="dummy") as omni:
        print("start", round(time.perf_counter() - began, 1), torch.cuda.memory_allocated() / 1e9, flush=True)
        for workload, steps in (("t2i-256", 35), ("t2i-480", 35), ("t2i-720", 35), ("t2v-256", 4), ("t2v-480", 2)):
            ask(omni, workload, 5 if SHAPES[workload][2] == 1 else 1)
            seconds, peak, _ = measured(lambda: ask(omni, workload, steps))  # noqa: B023
            alone = measured(lambda: decoded(omni, workload))[0]  # noqa: B023
            print(workload, steps, "steps", round(seconds, 3), "s, decode", round(alone, 3), "s,", round(peak, 1), "GB", flush=True)
        from torch.profiler import ProfilerActivity, profile

        for workload in ("t2i-256", "t2v-256"):
            with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
                measured(lambda: ask(omni, workload, 3))  # noqa: B023
            print(seen.key_averages().table(sort_by="self_cuda_time_total", row_limit=14, max_name_column_width=60)[:6000], flush=True)
    return [found]


GROUPS = {
    "images": (list(SHAPES)[:3], 3, 4), "video256": (["t2v-256"], 3, 2), "video480": (["t2v-480"], 1, 1), "video720": (["t2v-720"], 1, 1),
}  # fmt: skip
"""Workloads, runs (of diffusers, if it is one, seconds a step instead), and steps to warm up."""


def rows_of(group: str, where: Path) -> list[dict[str, Any]]:
    """`GROUP`, or one side of it: `GROUP:native` or `GROUP:diffusers`."""
    if group in ("check", "correct"):
        return {"check": check, "correct": correct}[group](where)
    name, _, side = group.partition(":")
    workloads, runs, warm = GROUPS[name]
    ours = native(where, workloads, runs, warm) if side != "diffusers" else []
    forget()
    return [*ours, *(diffusers(where, workloads, runs if runs > 1 else 0) if side != "native" else [])]


def merge(out: Path, parts: list[Path]) -> None:
    rows = [each for part in parts for each in json.loads(part.read_text()) if "engine" in each]
    checks = {each["workload"]: each for part in parts for each in json.loads(part.read_text()) if each.get("guidance") == 6.0}
    for each in rows:
        if each["workload"] in checks:
            each["error_to_exact"] = checks[each["workload"]]["ours_to_fp32" if each["engine"] == "native" else "diffusers_to_fp32"]
    for workload, seconds in PUBLISHED.items():
        rows.append({
            "workload": workload, "engine": "published", "tier": "exact", "end_to_end_s": seconds, "denoise_s": None, "decode_s": None,
            "peak_gb": None, "error_to_exact": None,
        })  # fmt: skip
    rows.sort(key=lambda each: list(SHAPES).index(each["workload"]))
    out.write_text("[\n" + ",\n".join(f" {json.dumps(each)}" for each in rows) + "\n]\n")


if __name__ == "__main__":
    if sys.argv[1] == "merge":
        merge(Path(sys.argv[2]), [Path(name) for name in sys.argv[3:]])
    else:
        with tempfile.TemporaryDirectory() as scratch:
            rows = rows_of(sys.argv[1], nano.folder(Path(scratch)))
        Path(sys.argv[2]).write_text(json.dumps(rows, indent=1) + "\n")
