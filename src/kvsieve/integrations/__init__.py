"""kvsieve inside other people's programs: one package per host, and `paged` for what they share."""
