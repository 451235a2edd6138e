"""The manifest: what a bundle says of itself, defined once for its writer and its reader.

Plain typed data.  Nothing here is evaluated, and nothing here imports Triton or torch.
Compatibility is decided by :data:`SCHEMA` and by each kernel's ``abi``, never by version strings.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Annotated, Literal, NoReturn

import msgspec
from msgspec import Meta, Struct

from fp8_aot.loader.errors import BundleError, SchemaError

SCHEMA = 1
"""Version of the manifest format that this package writes and reads."""

Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Positive = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Sha256 = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
Name = Annotated[str, Meta(min_length=1, max_length=256)]
Fp8 = Literal["e4m3fn", "e4m3fnuz"]
Specialization = Literal["aligned", "general"]


class _Base(Struct, frozen=True, forbid_unknown_fields=True):
    pass


class Dim(_Base, frozen=True):
    """Extent of a tensor dimension: ``ceil(symbol / group)``."""

    symbol: Name
    group: Annotated[int, Meta(ge=1, le=2**31 - 1)] = 1


class Tensor(_Base, frozen=True):
    """A tensor of a kernel; ``dtype`` is a dtype or the name of a dtype axis (``in``, ``out``, ``fp8``)."""

    name: Name
    dtype: Name
    shape: tuple[Dim, Dim]
    unit_dim: Literal[0, 1]
    output: bool


class Pointer(_Base, frozen=True, tag_field="role", tag="pointer"):
    """Argument: the address of a tensor; ``type`` is ``*`` and the tensor's dtype or dtype axis."""

    name: Name
    tensor: Name
    type: Name


class Size(_Base, frozen=True, tag_field="role", tag="size"):
    """Argument: the value of a size symbol."""

    name: Name
    symbol: Name
    type: Literal["i32"]


class Stride(_Base, frozen=True, tag_field="role", tag="stride"):
    """Argument: the stride, in elements, of one dimension of a tensor."""

    name: Name
    tensor: Name
    dim: Literal[0, 1]
    type: Literal["i64"]


Argument = Pointer | Size | Stride


class GridFactor(_Base, frozen=True):
    """One factor of a grid dimension: ``ceil(symbol / tile)``; ``tile`` is a constexpr or a number."""

    symbol: Name
    tile: Annotated[int, Meta(ge=1)] | Name


class Kernel(_Base, frozen=True):
    """What a launch needs to know of a kernel, the same for all its variants.

    ``abi`` is the sha256 of the fields that a caller depends on; ``source_sha256`` that of the
    Triton function and all it calls, comments and positions left out.
    """

    name: Name
    abi: Sha256
    source: Name
    source_sha256: Sha256
    promise: str
    tensors: tuple[Tensor, ...]
    args: tuple[Argument, ...]
    tiles: tuple[Name, ...]
    dtypes: dict[Name, tuple[Name, ...]]
    grid: tuple[tuple[GridFactor, ...], ...]
    specialized: tuple[Name, ...]


class Scratch(_Base, frozen=True):
    """Scratch memory per CTA, in bytes."""

    size: Count
    align: Count


class Parameter(_Base, frozen=True):
    """Place of one parameter in the launch buffer, in bytes."""

    offset: Count
    size: Count


class Variant(_Base, frozen=True):
    """One binary of a kernel.

    ``id`` is ``kernel/dtypes/tile/specialization``; ``tile`` names the tile config.
    ``divisible_by_16`` names the arguments that the binary assumes to be multiples of 16 (addresses
    in bytes, sizes and strides in elements).  ``params`` holds the place of each run-time argument, in
    order, then those of the global and the profile scratch pointers.  ``threads`` is the block size,
    ``shared`` the dynamic and ``static_shared`` the static shared memory in bytes, ``spills`` the bytes
    of local memory per thread.
    """

    id: Name
    kernel: Name
    dtypes: dict[Name, Name]
    tile: Name
    constexprs: dict[Name, int | float]
    num_warps: Positive
    num_stages: Count
    num_ctas: Positive
    specialization: Specialization
    divisible_by_16: tuple[Name, ...]
    object: Sha256
    object_size: Count
    symbol: Name
    threads: Positive
    shared: Count
    static_shared: Count
    registers: Count
    spills: Count
    params: tuple[Parameter, ...]
    global_scratch: Scratch
    profile_scratch: Scratch
    tensordesc: tuple[dict[str, int | str | tuple[int, ...] | bool], ...] = ()


class Condition(_Base, frozen=True):
    """``least <= symbol <= most``; None leaves a side open."""

    symbol: Name
    least: int | None = None
    most: int | None = None


class Rule(_Base, frozen=True):
    """The variants to use where every condition holds: ids by specialization, at least one.

    A launch that a rule's only variant does not fit goes on to the next rule.
    """

    when: tuple[Condition, ...]
    variants: dict[Specialization, Name]


class Dispatch(_Base, frozen=True):
    """Ordered rules of one kernel and dtype signature; the first that fits wins, the last fits any launch."""

    kernel: Name
    dtypes: dict[Name, Name]
    rules: tuple[Rule, ...]


class Target(_Base, frozen=True):
    """What the bundle's objects run on; ``arch`` is ``"90"`` or ``"gfx942"``."""

    name: Name
    backend: Literal["cuda", "hip"]
    arch: Name
    warp_size: Literal[32, 64]
    fp8: Fp8


class Assembler(_Base, frozen=True):
    """The program that made the objects; ``sha256`` is None where it is part of Triton's own library."""

    name: Name
    version: Name
    sha256: Sha256 | None


class Toolchain(_Base, frozen=True):
    """What the bundle was built with; ``min_driver`` is the least driver API version that loads it."""

    triton: Name
    assembler: Assembler
    min_driver: Count


class Provenance(_Base, frozen=True):
    """Where the sources came from; ``dirty`` when they differ from ``commit``."""

    commit: str | None
    dirty: bool | None
    kernels_sha256: Sha256
    matrix_sha256: Sha256


class Manifest(_Base, frozen=True):
    """The whole of ``manifest.json``."""

    schema: int
    project: Literal["fp8-aot"]
    version: Name
    target: Target
    toolchain: Toolchain
    provenance: Provenance
    kernels: tuple[Kernel, ...]
    variants: tuple[Variant, ...]
    dispatch: tuple[Dispatch, ...]


class _SchemaOnly(Struct):
    schema: int


_MAX_PARAMS = 32_764
"""Most bytes that the parameters of a kernel take: CUDA's limit, used for every target."""

_decoder = msgspec.json.Decoder(Manifest)


def encode(manifest: Manifest) -> bytes:
    """The manifest as canonical, readable JSON: two-space indent, one trailing newline."""
    return msgspec.json.format(msgspec.json.encode(manifest, order="sorted"), indent=2) + b"\n"


def decode(data: bytes, where: str) -> Manifest:
    """Parse ``manifest.json``; ``where`` names its bundle in errors.

    Raises:
        SchemaError: the manifest's schema is not the one that this package reads.
        BundleError: it is not a valid manifest.
    """
    try:
        schema = msgspec.json.decode(data, type=_SchemaOnly).schema
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BundleError(f"{where}: manifest.json is not valid: {error}") from None
    if schema != SCHEMA:
        relation = "a newer" if schema > SCHEMA else "an older"
        raise SchemaError(
            f"{where}: manifest schema {schema}, this fp8-aot reads schema {SCHEMA}: "
            f"use {relation} fp8-aot that reads schema {schema}, or rebuild the bundle with this one"
        )
    try:
        manifest = _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BundleError(f"{where}: manifest.json is not valid: {error}") from None
    check(manifest, where)
    return manifest


def abi_of(tensors: tuple[Tensor, ...], args: tuple[Argument, ...], dtypes: dict[str, tuple[str, ...]]) -> str:
    """The ``abi`` of a kernel: sha256 over what its callers depend on."""
    return hashlib.sha256(msgspec.json.encode((tensors, args, dtypes), order="sorted")).hexdigest()


def check(manifest: Manifest, where: str) -> None:
    """Check that the parts of a manifest refer to each other rightly.

    Raises:
        BundleError: a reference names what is not there, or a dispatch list has no last resort.
    """

    def fail(what: str) -> NoReturn:
        raise BundleError(f"{where}: manifest.json: {what}")

    kernels = {k.name: k for k in manifest.kernels}
    variants = {v.id: v for v in manifest.variants}
    if len(kernels) != len(manifest.kernels) or len(variants) != len(manifest.variants):
        fail("duplicate kernel or variant")
    for kernel in manifest.kernels:
        _check_kernel(kernel, fail)
    for variant in manifest.variants:
        kernel_of = kernels.get(variant.kernel)
        if kernel_of is None:
            fail(f"variant {variant.id} is of unknown kernel {variant.kernel}")
        _check_variant(variant, kernel_of, fail)
    signatures = [(entry.kernel, tuple(sorted(entry.dtypes.items()))) for entry in manifest.dispatch]
    if len(set(signatures)) != len(signatures):
        fail("duplicate dispatch")
    for entry in manifest.dispatch:
        if entry.kernel not in kernels:
            fail(f"dispatch for unknown kernel {entry.kernel}")
        symbols = {d.symbol for t in kernels[entry.kernel].tensors for d in t.shape}
        if not entry.rules or entry.rules[-1].when or "general" not in entry.rules[-1].variants:
            fail(f"dispatch of {entry.kernel} {entry.dtypes} has no last rule that serves any launch")
        for rule in entry.rules:
            unknown = {c.symbol for c in rule.when} - symbols
            if unknown:
                fail(f"dispatch of {entry.kernel} {entry.dtypes} asks for unknown size {', '.join(sorted(unknown))}")
            if not rule.variants:
                fail(f"dispatch of {entry.kernel} {entry.dtypes} has a rule without a variant")
            for kind, name in rule.variants.items():
                chosen = variants.get(name)
                if chosen is None or chosen.kernel != entry.kernel or chosen.dtypes != entry.dtypes:
                    fail(f"dispatch of {entry.kernel} {entry.dtypes} names {name}, which is no variant of it")
                elif chosen.specialization != kind:
                    fail(f"dispatch of {entry.kernel} {entry.dtypes} takes {name} for {kind}")
    for kernel in manifest.kernels:
        if kernel.abi != abi_of(kernel.tensors, kernel.args, kernel.dtypes):
            fail(f"kernel {kernel.name}: its abi is not that of its tensors, arguments and dtypes")


def _check_kernel(kernel: Kernel, fail: Callable[[str], NoReturn]) -> None:
    tensors = {t.name for t in kernel.tensors}
    symbols = {d.symbol for t in kernel.tensors for d in t.shape}
    if len(tensors) != len(kernel.tensors) or len({a.name for a in kernel.args}) != len(kernel.args):
        fail(f"kernel {kernel.name}: duplicate tensor or argument")
    if not any(isinstance(arg, Pointer) for arg in kernel.args):
        fail(f"kernel {kernel.name}: no argument is a pointer")
    for arg in kernel.args:
        if isinstance(arg, Size):
            if arg.symbol not in symbols:
                fail(f"kernel {kernel.name}: argument {arg.name} names unknown size {arg.symbol}")
        elif arg.tensor not in tensors:
            fail(f"kernel {kernel.name}: argument {arg.name} names unknown tensor {arg.tensor}")
    if not kernel.grid or len(kernel.grid) > 3:
        fail(f"kernel {kernel.name}: a grid has one to three dimensions")
    for factor in (f for axis in kernel.grid for f in axis):
        if factor.symbol not in symbols or not (isinstance(factor.tile, int) or factor.tile in kernel.tiles):
            fail(f"kernel {kernel.name}: grid factor {factor.symbol}/{factor.tile} names nothing of it")
    plain = {d.symbol for t in kernel.tensors for d in t.shape if d.group == 1}
    if symbols - plain:
        fail(f"kernel {kernel.name}: no tensor gives the value of {', '.join(sorted(symbols - plain))}")


def _check_variant(variant: Variant, kernel: Kernel, fail: Callable[[str], NoReturn]) -> None:
    if len(variant.params) != len(kernel.args) + 2:
        fail(f"variant {variant.id}: {len(variant.params)} parameters for {len(kernel.args)} arguments and 2 scratch")
    for arg, param in zip(kernel.args, variant.params, strict=False):
        if param.size != (4 if isinstance(arg, Size) else 8):
            fail(f"variant {variant.id}: argument {arg.name} has a parameter of {param.size} bytes")
    end = 0
    for param in variant.params:
        if param.offset < end:
            fail(f"variant {variant.id}: the parameter at {param.offset} overlaps the one before it")
        end = param.offset + param.size
    if end > _MAX_PARAMS:
        fail(f"variant {variant.id}: parameters of {end} bytes, expected at most {_MAX_PARAMS}")
    if any(param.size != 8 for param in variant.params[-2:]):
        fail(f"variant {variant.id}: a scratch pointer is not of 8 bytes")
    pointers = [p.offset for a, p in zip(kernel.args, variant.params, strict=False) if isinstance(a, Pointer)]
    if pointers != list(range(pointers[0], pointers[0] + 8 * len(pointers), 8)):
        fail(f"variant {variant.id}: pointer arguments are not next to each other")
    if not set(variant.divisible_by_16) <= {a.name for a in kernel.args}:
        fail(f"variant {variant.id}: assumes something of an unknown argument")
    if variant.specialization == "general" and variant.divisible_by_16:
        fail(f"variant {variant.id}: is general, and assumes something of {', '.join(variant.divisible_by_16)}")
    for tile in kernel.tiles:
        value = variant.constexprs.get(tile)
        if not isinstance(value, int) or value < 1:
            fail(f"variant {variant.id}: tile constexpr {tile} is {value!r}")
