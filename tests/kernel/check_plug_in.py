"""What `gpu_check --before` calls on a described machine: lets JAX find its devices, and brings parts to fail."""

import os
import signal
import time


def before(part: str) -> None:
    """JAX looks for device files before it asks the driver."""
    from jax._src import hardware_utils

    hardware_utils.has_visible_nvidia_gpu = lambda: True


def fault(part: str) -> None:
    """Fail in the way that the environment names for the part: DESCRIBED_FAULTS is `part=fault,...`."""
    faults = dict(each.split("=") for each in os.environ["DESCRIBED_FAULTS"].split(","))
    match faults.get(part):
        case "raise":
            raise ValueError(f"a fault in {part}")
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "exit":
            os._exit(7)
        case "hang":
            time.sleep(3600)
        case None:
            before(part)
