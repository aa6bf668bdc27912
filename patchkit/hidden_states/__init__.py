"""Hidden states for training a drafter: read dumps, extract, pack, validate, report.

R(k) is the residual stream that enters layer k; of n layers, R(n) is the state after the last one and
before the final norm. A sample is a token sequence with one [tokens, hidden] state for each chosen k. Heavy
libraries are imported when they are used, through ``patchkit.hidden_states.errors.need``.
"""
