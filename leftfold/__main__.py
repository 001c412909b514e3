"""`python -m leftfold` is `leftfold`."""

from leftfold.cli import main

raise SystemExit(main())
