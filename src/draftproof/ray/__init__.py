"""Ray Serve: replicas of the engine behind one HTTP address.

    serve run draftproof.ray:app
    serve run draftproof.ray:build_app model=smollm2-135m num_replicas=2

The options of `build_app` are those of `draftproof serve --config` and of `options.RayOptions`.
"""

from __future__ import annotations

from typing import Any

from draftproof.ray.build import build_app

__all__ = ["app", "build_app"]


def __getattr__(name: str) -> Any:
    """Build `app`, the application with default options, when it is imported."""
    if name == "app":
        return build_app({})
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
