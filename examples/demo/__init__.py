"""The demo, ``make demo``: a module for each part of the account."""
