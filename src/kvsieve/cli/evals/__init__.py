"""``kvsieve eval``: what a model still finds, keeps and says when it reads only some blocks."""
