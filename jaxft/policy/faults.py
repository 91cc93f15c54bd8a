"""What stops a policy as a whole: no single request is to blame, and asking again does not help. Needs no JAX."""


class PolicyError(RuntimeError):
    """The policy cannot go on."""

    exit_code = 1


class PolicyLostError(PolicyError):
    """The parameters were given up to an update that failed; they have to be restored from a checkpoint."""


class DeviceMemoryError(PolicyError):
    """The device has too little memory for what the configuration asks; the message names what to lower."""


class DeviceThreadError(PolicyError):
    """The thread that does the work on the device takes no more of it, or was stopped in the middle of it."""
