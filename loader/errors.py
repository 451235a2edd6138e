"""Every error that the loader raises, one type for each thing a caller may want to tell apart."""


class LoaderError(RuntimeError):
    """Base of all errors of ``fp8_aot.loader`` other than wrong arguments (TypeError, ValueError)."""


class BundleError(LoaderError):
    """A bundle is missing a part, damaged, or not a bundle."""


class SchemaError(BundleError):
    """A bundle's manifest has a schema that this package does not read."""


class IntegrityError(BundleError):
    """A bundle's bytes are not the ones that its manifest describes."""


class DriverError(LoaderError):
    """The GPU driver is missing, too old, or refused a call; ``code`` is its error code, if any."""

    def __init__(self, message: str, code: int | None = None) -> None:
        super().__init__(message)
        self.code = code


class MissError(LoaderError):
    """No prebuilt kernel fits a launch, and the JIT is forbidden, not installed, or not offered (``launch``)."""


class CaptureError(LoaderError):
    """A kernel would have to be loaded while a stream is being captured into a graph."""


class ForkError(LoaderError):
    """The driver was used before this process was forked: GPU drivers do not survive a fork."""
