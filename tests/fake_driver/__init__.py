"""Stand-ins for ``libcuda.so.1`` and ``libamdhip64.so``, for tests on a machine without a GPU.

Their functions are C function pointers, so that argument types, pointers, structs and the ``extra`` array
of a launch pass through the same machinery as with a real library::

    fake = FakeCuda(devices=[FakeDevice("90"), FakeDevice("90")], version=13000)
    driver = fake.driver()                        # a CudaDriver over it
    function = driver.load(0, b"any bytes", "kernel", shared=0)
    ...
    assert fake.launches[0].params == b"..."

A stand-in keeps the rules that the loader must respect, and answers a breach with the driver's own error
code: nothing works before ``cuInit``, a thread without a context gets 201, a function only launches on the
device it belongs to, shared memory above 48 KiB (NVIDIA) wants an opt-in, the null stream is unusable while
another stream is being captured.  Any image loads, and has every symbol.

What a test can set, at any time:

``failing``
    function name to the error code that the function returns from then on, without doing anything.
``capturing``
    handles of the streams that are being captured.
``unknown_symbols``
    names that no image has.

What a test can read: ``launches``, ``loads`` and ``unloads`` in order, ``calls`` (every function name in
order), ``context_depth()`` of the calling thread, ``opt_ins`` (symbol, bytes), ``errors`` (exceptions inside
a stand-in function, which ctypes would swallow; the function then returns 999).
"""

from fake_driver.base import FakeDevice, Launch, Load
from fake_driver.cuda import FakeCuda
from fake_driver.hip import FakeHip

__all__ = ["FakeCuda", "FakeDevice", "FakeHip", "Launch", "Load"]
