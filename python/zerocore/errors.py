"""The exceptions of zerocore.

Messages read `[area] what happened: got X, expected Y. How to fix it.`
"""


class Error(RuntimeError):
    """Base of everything that zerocore raises."""


class ConfigError(ValueError, Error):
    """A configuration that is wrong, contradicts itself, or asks for what is not available."""


class CommError(Error):
    """Ranks that do not do the same, a peer that is gone, or one that does not answer in time."""


class IoError(OSError, Error):
    """Reading or writing failed; `errno` says why, `filename` where."""

    def __str__(self) -> str:
        """The message alone: OSError's would say number and name once more."""
        return self.strerror if isinstance(self.strerror, str) else super().__str__()


class CheckpointError(Error):
    """A checkpoint, or a part of it, that is missing, damaged, or not what was asked for."""


class DeviceError(Error):
    """A device is missing, out of memory, or failed."""


class UnsupportedError(NotImplementedError, Error):
    """A use that zerocore does not support."""


class NonFiniteError(FloatingPointError, Error):
    """A loss or gradient is inf or NaN and the configuration says not to go on."""


class InternalError(Error):
    """A defect of zerocore itself."""
