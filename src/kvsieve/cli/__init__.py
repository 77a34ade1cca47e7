"""The command line: one module per command, typer and rich nowhere else."""
