"""`python -m measure`: ds4 beside a peer on the same files, in turns, and both beside what memory allows. See docs/performance.md."""
