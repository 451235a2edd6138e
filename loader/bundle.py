"""One bundle in memory: its manifest, and its objects once they have been checked."""

from __future__ import annotations

import hashlib
from pathlib import Path

from fp8_aot.loader.errors import BundleError, IntegrityError
from fp8_aot.loader.schema import Dispatch, Kernel, Manifest, Variant, decode, read

DtypeKey = tuple[tuple[str, str], ...]


def dtype_key(dtypes: dict[str, str]) -> DtypeKey:
    """Dtype axes in a fixed order, to look a signature up by."""
    return tuple(sorted(dtypes.items()))


class Bundle:
    """A bundle, read whole, so that a file replaced on disk changes nothing for this process.

    Raises:
        BundleError: the file cannot be read, is damaged or has another schema.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            raise BundleError(f"{path}: does not exist") from None
        except (OSError, ValueError) as error:
            raise BundleError(f"{path}: cannot be read: {error}") from None
        self._entries = read(data, str(path))
        self.manifest: Manifest = decode(bytes(self._entries["manifest.json"]), str(path))
        self.kernels: dict[str, Kernel] = {k.name: k for k in self.manifest.kernels}
        self.variants: dict[str, Variant] = {v.id: v for v in self.manifest.variants}
        self._dispatch: dict[tuple[str, DtypeKey], Dispatch] = {
            (d.kernel, dtype_key(d.dtypes)): d for d in self.manifest.dispatch
        }

    def dispatch(self, kernel: str, dtypes: dict[str, str]) -> Dispatch | None:
        """The dispatch rules of a kernel for a dtype signature, or None."""
        return self._dispatch.get((kernel, dtype_key(dtypes)))

    def object(self, variant: Variant) -> bytes:
        """The contents of a variant's object.

        Raises:
            IntegrityError: it is missing, or its size or digest is not the manifest's.
        """
        extension = "cubin" if self.manifest.target.backend == "cuda" else "hsaco"
        name = f"objects/{variant.object}.{extension}"
        view = self._entries.get(name)
        if view is None:
            raise IntegrityError(f"{self.path}: {name} of {variant.id} is missing: build or fetch the bundle again")
        if len(view) != variant.object_size:
            raise IntegrityError(
                f"{self.path}: {name} has {len(view)} bytes, the manifest says {variant.object_size}: "
                "build or fetch the bundle again"
            )
        if hashlib.sha256(view).hexdigest() != variant.object:
            raise IntegrityError(f"{self.path}: {name} is damaged (sha256): build or fetch the bundle again")
        return bytes(view)
