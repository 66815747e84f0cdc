"""`python -m saguaro_runtime.cli`."""

from . import main

raise SystemExit(main())
