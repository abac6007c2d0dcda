"""Finding the node's real driver libraries and writing the proxies that stand before them."""
