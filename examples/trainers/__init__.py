"""Environments that hold one trainer release each, for machines without an accelerator."""
