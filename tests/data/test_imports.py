import subprocess
import sys
from pathlib import Path


def test_importing_the_data_modules_does_not_import_jax() -> None:
    code = (
        "import importlib, pkgutil, sys, jaxtrain.data, jaxtrain.prepare\n"
        "for module in pkgutil.walk_packages(jaxtrain.data.__path__, 'jaxtrain.data.'):\n"
        "    importlib.import_module(module.name)\n"
        "sys.exit('jax' in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).resolve().parents[2])
