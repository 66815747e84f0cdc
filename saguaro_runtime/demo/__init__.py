"""`saguaro demo`: a small real pair, fetched once, and the methods compared on it."""
