"""Make the packages of ingest, score and control small: what litellm does without goes, and Python
keeps the bytecode of what these processes import alone (52 MB; of all packages 128).
"""

import shutil
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from pkgutil import walk_packages

import deploy
import ingest
import sidecar

spec = find_spec("litellm")
if spec is not None and spec.origin is not None:
    litellm = Path(spec.origin).parent
    # Pages of its own proxy, 22 MB, and a native part that it loads where it is, 37 MB.
    shutil.rmtree(litellm / "proxy/_experimental/out", ignore_errors=True)
    for native in (litellm / "rust_bridge").glob("_native.*.so"):
        native.unlink()
    import_module("litellm")
for package in (sidecar, ingest, deploy):
    for module in walk_packages(package.__path__, f"{package.__name__}."):
        if ".migrations." not in module.name and not module.name.endswith("__main__"):
            import_module(module.name)
