"""Arms, rounds and tables of compare_peers.py."""
