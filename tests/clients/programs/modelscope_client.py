"""Finds models by name on ModelScope, with its real package: prints what each of the given options comes to, as JSON.

Runs in an environment that has the package; the path of the checkout is on PYTHONPATH.
"""

import json
import sys

from fastdeploy_sd.config import config_from_kwargs
from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.hub import located

found = []
for options in json.loads(sys.argv[1]):
    try:
        config = located(config_from_kwargs(model_source="modelscope", **options))
        found.append({"folder": config.model.model, "names": config.model.served_names})
    except ConfigError as error:
        found.append({"refusal": error.message})
print(json.dumps(found))
