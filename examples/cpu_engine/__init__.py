"""The real SGLang server on a CPU, for the demo and the tests.

``venv`` builds an environment that holds one pinned release, ``tiny_model`` writes a model it can
serve, ``server`` runs it. Only the standard library is used on this side.
"""
