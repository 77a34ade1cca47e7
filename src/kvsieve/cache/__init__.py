"""Where keys and values live: a pool of pages, and the table of pages of each sequence."""
