"""A process that lends its devices to an engine whose leader is elsewhere: `jaxpage serve --process-id 1 ...`.

It loads its part of the model and runs what the leader runs. It has no scheduler and knows no requests.
"""

import logging
import os

from jaxpage.config import EngineConfig
from jaxpage.engine.gpu_memory import share_for_engine
from jaxpage.runner.model import open_model
from jaxpage.runner.runner import Runner


def follow(config: EngineConfig) -> int:
    """Follow process 0 to its end. Raises `ModelLoadError` or `ConfigError`."""
    logging.basicConfig(level=logging.INFO, format=f"%(levelname)s process {config.process_id}: %(message)s")
    os.environ.update(share_for_engine(os.environ))
    runner = Runner(*open_model(config))
    runner.warm_up()
    runner.follow()
    return 0
