"""`python -m benchmarks.lifecycle`."""

from benchmarks.lifecycle.soak import main

raise SystemExit(main())
