"""The loader's state in this process: devices, the bundle of each, and the kernels that are loaded."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from fnmatch import fnmatchcase

from msgspec import Struct

from fp8_aot.loader.bundle import Bundle
from fp8_aot.loader.counter import Counter
from fp8_aot.loader.dispatch import Choice, Step, argument_values, choose, grid_of
from fp8_aot.loader.driver import Device, Driver, Function, get_driver
from fp8_aot.loader.errors import CaptureError, DriverError, ForkError
from fp8_aot.loader.find import Accepted, Decision, Rejected, find
from fp8_aot.loader.plan import Plan
from fp8_aot.loader.schema import Pointer, Variant
from fp8_aot.loader.views import TensorView

_MAX_PLANS = 4096
"""Plans kept per device; a workload with more combinations of sizes and strides than this starts over."""


class Stats(Struct, frozen=True):
    """Counts since the process started.

    ``loads``: kernels loaded onto a device; ``launches``: launches of prebuilt kernels; ``misses``:
    launches that no prebuilt kernel fitted; ``fallbacks``: launches by the JIT.
    """

    loads: int
    launches: int
    misses: int
    fallbacks: int


class DeviceState:
    """One device: its bundle, if any was accepted, and its loaded kernels."""

    def __init__(self, driver: Driver, device: Device) -> None:
        self.driver = driver
        self.device = device
        self.bundle: Bundle | None = None
        self._lock = threading.Lock()
        self._candidates = find(driver, device)
        self._decisions: list[Decision] = []
        for decision in self._candidates:
            self._decisions.append(decision)
            if isinstance(decision, Accepted):
                self.bundle = decision.bundle
                break
        self.functions: dict[tuple[str, str, int], Function] = {}
        self.plans: dict[tuple[str | int, ...], Plan] = {}

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """The decision on every candidate; those behind the accepted bundle are made when first asked for."""
        with self._lock:
            self._decisions.extend(self._candidates)
            return tuple(self._decisions)

    def no_bundle(self, cell: str) -> Choice:
        """A choice that fails because no bundle was accepted for this device."""
        reason = f"no bundle for {self.driver.backend} {self.device.arch}"
        return Choice(cell, None, (*self.steps(), Step("bundles", False, reason)))

    def steps(self) -> tuple[Step, ...]:
        """The decisions on bundles, as steps on the way to a variant; the first accepted bundle was taken."""
        steps = []
        for decision in self.decisions:
            taken = False
            if isinstance(decision, Rejected):
                reason = decision.reason
            elif decision.bundle is self.bundle:
                taken, reason = True, f"built for {self.driver.backend} {self.device.arch}"
            else:
                reason = "a bundle before it was taken"
            steps.append(Step(f"{decision.path} ({decision.origin})", taken, reason))
        return tuple(steps)


class Runtime:
    """Loads under one lock; launching takes no lock.

    Attributes:
        launches, misses, fallbacks: what :class:`Stats` counts.
        on_change: called when every plan has become void.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._reading = threading.Lock()
        self._states: dict[tuple[str, int], DeviceState] = {}
        self._loads = 0
        self.launches, self.misses, self.fallbacks = Counter(), Counter(), Counter()
        self._used = self._forked = False
        self.on_change: list[Callable[[], None]] = []
        os.register_at_fork(after_in_child=self._after_fork)

    def _after_fork(self) -> None:
        # The child has a copy of the parent's handles and no driver behind them: even a driver that had only
        # been initialised refuses every call.  Another thread of the parent may have held a lock.
        self._lock = threading.RLock()
        self._reading = threading.Lock()
        self._forked = self._used
        self._changed()

    def _changed(self) -> None:
        for forget in self.on_change:
            forget()

    def check_fork(self) -> None:
        """Make sure that the driver may be called.

        Raises:
            ForkError: this process was forked from one in which the loader had used the driver.
        """
        if self._forked:
            raise ForkError(
                "this process was forked after fp8_aot.loader had used the GPU driver, and GPU drivers do not "
                "survive a fork: use multiprocessing's 'spawn' or 'forkserver', or fork before the first launch"
            )

    def state(self, backend: str, ordinal: int) -> DeviceState:
        """The state of a device, found on first use.

        Raises:
            ForkError: this process was forked from one in which the loader had used the driver.
            DriverError: the driver is missing, or has no such device.
        """
        self.check_fork()
        found = self._states.get((backend, ordinal))
        if found is not None:
            return found
        with self._lock:
            if (backend, ordinal) not in self._states:
                driver = get_driver(backend)
                self._used = True
                devices = driver.devices()
                device = next((d for d in devices if d.ordinal == ordinal), None)
                if device is None:
                    raise DriverError(f"device is {ordinal}, this machine has {len(devices)} {backend} devices")
                self._states[backend, ordinal] = DeviceState(driver, device)
            return self._states[backend, ordinal]

    def choose(
        self, state: DeviceState, kernel: str, dtypes: dict[str, str], sizes: Mapping[str, int],
        tensors: Mapping[str, TensorView],
    ) -> tuple[Choice, dict[str, int]]:  # fmt: skip
        """The choice for a launch, and the values of its arguments (empty where there is no bundle)."""
        bundle = state.bundle
        if bundle is None or kernel not in bundle.kernels:
            cell = f"{kernel} on {state.driver.backend} {state.device.arch}"
            return state.no_bundle(cell) if bundle is None else choose(bundle, kernel, dtypes, sizes, {}), {}
        values = argument_values(bundle.kernels[kernel], tensors, sizes)
        return choose(bundle, kernel, dtypes, sizes, values), values

    def plan(
        self, state: DeviceState, kernel: str, dtypes: dict[str, str], sizes: Mapping[str, int],
        tensors: Mapping[str, TensorView], stream: int,
    ) -> tuple[Plan | None, Choice]:  # fmt: skip
        """The plan for a launch, its kernel loaded; None, with the choice that failed, on a miss.

        Raises:
            CaptureError: the kernel would have to be loaded while ``stream`` is being captured.
            IntegrityError, DriverError: the object is damaged, or the driver refused it.
        """
        choice, values = self.choose(state, kernel, dtypes, sizes, tensors)
        if choice.variant is None or state.bundle is None:
            return None, choice
        entry = state.bundle.kernels[kernel]
        variant = choice.variant
        scalars = [values[arg.name] for arg in entry.args if not isinstance(arg, Pointer)]
        key: tuple[str | int, ...] = (variant.id, *sizes.values(), *scalars)
        plan = state.plans.get(key)
        if plan is None:
            grid = grid_of(entry, variant, sizes)
            function = self._function(state, variant, stream)
            plan = Plan(state.driver, function, entry, variant, values, grid, self.launches.add)
            if len(state.plans) >= _MAX_PLANS:
                state.plans.clear()
            state.plans[key] = plan
        return plan, choice

    def _function(self, state: DeviceState, variant: Variant, stream: int | None) -> Function:
        key = (variant.object, variant.symbol, variant.shared)
        function = state.functions.get(key)
        if function is not None:
            return function
        with self._lock:
            if key not in state.functions:
                assert state.bundle is not None
                if stream is not None and self._capturing(state, stream):
                    raise CaptureError(
                        f"{variant.id} is not loaded yet, and the stream is being captured into a graph: call "
                        "fp8_aot.loader.preload() before the capture"
                    )
                image = state.bundle.object(variant)
                state.functions[key] = state.driver.load(state.device.ordinal, image, variant.symbol, variant.shared)
                self._loads += 1
            return state.functions[key]

    @staticmethod
    def _capturing(state: DeviceState, stream: int) -> bool:
        # A thread that has not used the device yet has no context to ask in.
        with state.driver.on_device(state.device.ordinal):
            return state.driver.is_capturing(stream)

    def preload(self, state: DeviceState, globs: tuple[str, ...]) -> int:
        """Load every variant of the matching kernels; the number of variants.

        Raises:
            ValueError: a glob matches no kernel of the bundle.
        """
        if state.bundle is None:
            return 0
        names = list(state.bundle.kernels)
        for glob in globs:
            if not any(fnmatchcase(name, glob) for name in names):
                raise ValueError(
                    f"kernels: {glob!r} matches no kernel of {state.bundle.path}, it has {', '.join(names)}"
                )
        chosen = [
            v for v in state.bundle.variants.values() if not globs or any(fnmatchcase(v.kernel, glob) for glob in globs)
        ]
        for variant in chosen:
            self._function(state, variant, None)
        return len(chosen)

    def unload(self) -> None:
        """Unload every kernel and forget every bundle; the next launch starts anew.

        No launched kernel may still be running.
        """
        with self._lock:
            states = list(self._states.values())
            self._states.clear()
            self._changed()
            if self._forked:
                return
            # One that the driver refuses to unload does not keep the others loaded.
            with ExitStack() as stack:
                for state in states:
                    for function in state.functions.values():
                        stack.callback(state.driver.unload, function)

    def stats(self) -> Stats:
        """The counts so far."""
        with self._reading:
            return Stats(self._loads, self.launches.value(), self.misses.value(), self.fallbacks.value())


runtime = Runtime()
"""The one runtime of this process."""
