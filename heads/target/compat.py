"""What differs between the supported releases of transformers, in one place."""

from __future__ import annotations

import transformers
from packaging.version import Version

# The forward keyword for the cache was renamed in 5.24.
CACHE_KEYWORD = "cache" if Version(transformers.__version__) >= Version("5.24") else "past_key_values"
