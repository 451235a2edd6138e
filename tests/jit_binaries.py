"""The binaries that Triton's JIT makes, without a GPU: run as a program, it prints their digests.

    python tests/jit_binaries.py MATRIX [TARGET ...] < /dev/null

A stand-in driver answers what the JIT asks before it compiles, and ``JITFunction.warmup`` then takes the
JIT's own path (specialisation from values, signature, options) to a binary.  Prints a JSON object: target,
then cell id, then the binary's sha256 (and the PTX's, since ptxas 12.9 is not deterministic for sm100).

On AMD the JIT also records whether a tensor's storage is below 2 GiB; bundles assume nothing of that, so
the stand-in tensors here are larger.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

NAMES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp32": "float32",
    "e4m3fn": "float8_e4m3fn",
    "e4m3fnuz": "float8_e4m3fnuz",
}


class Dtype:
    """Stands for a torch dtype, which the JIT knows by its name only."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __str__(self) -> str:
        return f"torch.{self.name}"

    __repr__ = __str__


DTYPES = {ours: Dtype(theirs) for ours, theirs in NAMES.items()}


class StandInTensor:
    """A tensor at an address, of 4 GiB."""

    def __init__(self, dtype: Dtype, address: int) -> None:
        self.dtype = dtype
        self.address = address

    def data_ptr(self) -> int:
        return self.address

    @staticmethod
    def ptr_range() -> int:
        return 2**32


def stand_in_driver(target):
    from triton.backends.driver import DriverBase

    class StandIn(DriverBase):
        def __init__(self):
            pass

        @classmethod
        def is_active(cls):
            return True

        def get_current_target(self):
            return target

        def get_current_device(self):
            return 0

        def get_current_stream(self, device):
            return 0

        def get_active_torch_device(self):
            return None

        def map_python_to_cpp_type(self, ty):
            raise NotImplementedError

        def get_benchmarker(self):
            raise NotImplementedError

    return StandIn()


def digests(matrix_path: str, target_name: str) -> dict[str, list[str]]:
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ["TRITON_DISABLE_LINE_INFO"] = "1"
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        return _digests(matrix_path, target_name)


def _digests(matrix_path: str, target_name: str) -> dict[str, list[str]]:
    import triton
    from triton.backends.compiler import GPUTarget

    from fp8_aot.aot.cells import expand
    from fp8_aot.aot.matrix import load
    from fp8_aot.kernels.spec import COMPILE_OPTIONS, Pointer

    found = {}
    seen: dict[tuple, list[str]] = {}
    matrix = load(Path(matrix_path))
    target = matrix.targets[target_name]
    triton.runtime.driver.set_active(stand_in_driver(GPUTarget(target.backend, target.triton_arch, target.warp_size)))
    for cell in expand(matrix, [target_name]):
        if cell.excluded is not None:
            continue
        spec, config = cell.entry.spec, cell.tile.config
        aligned = cell.specialization == "aligned"
        args = []
        for arg in spec.args:
            fits = aligned and arg.specialize
            if isinstance(arg, Pointer):
                dtype = DTYPES[spec.pointer_dtype(arg, cell.dtypes, target.fp8)]
                args.append(StandInTensor(dtype, 4096 if fits else 4099))
            else:
                args.append(4096 if fits else 4099)
        options = {
            "num_warps": config.num_warps,
            "num_stages": config.num_stages,
            "num_ctas": config.num_ctas,
            **COMPILE_OPTIONS,
        }
        constexprs = spec.constexprs(config, target.fp8)
        key = (spec.fn, *map(str, (cell.dtypes, constexprs, options, aligned)))
        if key not in seen:
            compiled = spec.fn.warmup(*args, grid=(1,), **constexprs, **options)
            binary = compiled.asm["cubin" if target.backend == "cuda" else "hsaco"]
            text = compiled.asm.get("ptx", "")
            seen[key] = [hashlib.sha256(data).hexdigest() for data in (binary, text.encode())]
        found[cell.id] = seen[key]
    return found


def main(matrix_path: str, *targets: str) -> None:
    # A process for each target: JIT functions keep what they compiled for one.
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn"), max_tasks_per_child=1) as pool:
        futures = {target: pool.submit(digests, matrix_path, target) for target in targets}
        json.dump({target: future.result() for target, future in futures.items()}, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
