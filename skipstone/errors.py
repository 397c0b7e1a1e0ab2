"""The errors a user can cause. Each message names the field, its value and the way out.

The command line prints the message alone and exits with `exit_code`; the server answers 400. Anything else that is
raised is a bug of ours and keeps its traceback.
"""


class SkipstoneError(Exception):
    """Base of every error a user can cause."""

    exit_code = 2


class ConfigError(SkipstoneError):
    """An option or a key of a checkpoint's config.json is missing, unknown or out of range."""


class RequestError(SkipstoneError):
    """One request is invalid; the engine and its other requests go on."""


class UnsupportedError(SkipstoneError):
    """Two features that cannot work together, or an architecture we do not have; names both."""


class CheckpointError(SkipstoneError):
    """A model folder whose files are missing, truncated or do not match the architecture."""


class ShapeError(SkipstoneError):
    """A tensor with another shape than the contract says: the caller of a public function is wrong."""
