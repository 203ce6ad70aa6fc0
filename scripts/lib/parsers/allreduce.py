"""Parser of the image's `minivm-allreduce`: NCCL's all-reduce over the GPUs of this node, as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from health.api import Class, Context, Finding, Inputs, Unreadable, ok, problem
from parsers import nvidia_smi

ARGUMENTS = ("minivm-allreduce", "--max-bytes", "256M", "--timeout", "90")


@dataclass(frozen=True, slots=True)
class Measured:
    model: str
    gpus: int
    busbw: float
    wrong: int
    hangs: bool = False


def parse(inputs: Inputs, source: str) -> Measured:
    text = inputs[source]
    gpus = nvidia_smi.parse(inputs["nvidia_smi_q"])
    if not gpus:
        raise Unreadable("nvidia-smi describes no GPU")
    if "a GPU or a link hangs" in text:
        return Measured(gpus[0].model, len(gpus), 0.0, 0, hangs=True)
    start = text.find("{")
    try:
        data = json.JSONDecoder().raw_decode(text[start:])[0] if start >= 0 else None
    except ValueError as error:
        raise Unreadable(f"minivm-allreduce: {error}") from error
    if not isinstance(data, dict):
        message = next((line.strip() for line in text.splitlines() if line.strip()), "nothing")
        raise Unreadable(f"minivm-allreduce said: {message[:200]}")
    ranks, results = data.get("gpus"), data.get("results")
    if not isinstance(ranks, list) or not isinstance(results, list) or not results:
        raise Unreadable("minivm-allreduce: wanted gpus and results")
    return Measured(
        gpus[0].model,
        len(ranks),
        max(_number(row, "busbw_gb_s") for row in results),
        int(sum(_number(row, "wrong") for row in results)),
    )


def _number(row: Any, key: str) -> float:
    value = row.get(key) if isinstance(row, dict) else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Unreadable(f"minivm-allreduce: {key}: {value!r}")
    return float(value)


def judge(measured: Measured, context: Context, threshold: str, over: str) -> Iterable[Finding]:
    least = context.limits.model(measured.model).number(threshold)
    shown, wanted = f"{measured.busbw:.1f} GB/s", f"{least:g} GB/s"
    message = f"all-reduce over {measured.gpus} GPUs{over}"
    if measured.hangs:
        return [problem(f"{message} does not end: a GPU or a link hangs", class_=Class.REBOOT, measured="hangs")]
    if measured.wrong:
        return [problem(f"{message} gives wrong sums", class_=Class.RMA, measured=measured.wrong, threshold=0)]
    if measured.gpus < 2:
        # One GPU sends nothing over a link: the result proves the sum but no bandwidth.
        return [ok(f"{message}: the sums are right", measured=shown)]
    if measured.busbw < least:
        return [problem(f"{message}: {shown}", measured=shown, threshold=wanted)]
    return [ok(f"{message}: {shown}", measured=shown, threshold=wanted)]
