"""Memory that outlives a rank: a page for each rank, and one for the launcher's Notice, in a file without a name."""

PAGES = "LOCKSTEP_PAGES"  # environment variable: the path at which ranks open the file, which the launcher holds open
PAGE_BYTES = 4096
PAGE_ROWS = 4  # of a rank's page. Each belongs to a step: a number that says which, then sums, all in float64.
