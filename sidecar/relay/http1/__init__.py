"""HTTP/1.1 and server-sent events as bytes: heads, reply parser, event boundaries. No policy."""
