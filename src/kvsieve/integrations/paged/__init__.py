"""Padded batches of any host in pages: masks, rows, settings and counts, on plain arrays.

What a host's own package puts behind its interfaces; nothing here knows a host.
"""
