"""The build's one check; everything else is in pyproject.toml."""

from pathlib import Path

from setuptools import setup

PACKAGE = Path(__file__).resolve().parent / "src" / "specjax"
missing = [name for name in ("kernels", "models", "sharding") if not (PACKAGE / name / "__init__.py").is_file()]
if missing:
    raise SystemExit(
        f"{PACKAGE} holds no {', '.join(missing)}: this checkout was made without symbolic links. Check it out again with "
        "`git clone -c core.symlinks=true` (on Windows in developer mode), or install a wheel instead"
    )
setup()
