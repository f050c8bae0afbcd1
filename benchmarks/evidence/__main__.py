"""`python -m benchmarks.evidence`."""

from benchmarks.evidence.scraping import main

raise SystemExit(main())
