"""Errors a user can act on. Each message names what was expected and what came."""


class KvsieveError(Exception):
    """Base of every error this package raises on purpose."""


class ConfigError(KvsieveError, ValueError):
    """An option or argument is out of range, unknown, or contradicts another."""


class ShapeError(KvsieveError, ValueError):
    """An array has the wrong shape, dtype or layout."""


class ModelFileError(KvsieveError):
    """A model file is damaged, truncated, or of a kind that is not supported."""


class CapacityError(KvsieveError):
    """Something does not fit: a prompt in the context, a model in memory, a sequence in a cache."""


class TemplateError(KvsieveError):
    """A chat template is missing, malformed, or refused the messages."""


class NumericalError(KvsieveError):
    """A computation met NaN or infinity where only finite numbers are possible."""


class QueueFullError(CapacityError):
    """Too many requests wait already; `retry_after_s` is when a place is likely."""

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ServiceClosedError(KvsieveError):
    """The service accepts no more requests."""


class SlotFileError(KvsieveError):
    """A saved slot is missing, damaged, or belongs to another model or cache."""


class MissingPackageError(ConfigError, ImportError):
    """An optional package is not installed; the message names the extra that brings it."""
