"""One function a command: takes a workspace, returns a ``report.Result``, raises typed errors."""
