"""Errors of the builder, by what the user can do about them."""


class UsageError(Exception):
    """The input is wrong (a matrix, an option, an installed version): nothing was compiled."""


class WorkError(Exception):
    """The input was right and the work failed: a cell did not compile, a bundle is damaged."""
