"""`python -m benchmarks.faults`."""

from benchmarks.faults.study import main

raise SystemExit(main())
